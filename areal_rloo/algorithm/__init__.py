"""The mathematics alone, on tensors and integers: no models, no processes, no files.

`staleness` bounds how old a trained token may be; admission and deadlines follow from the bound (needs no torch).
`normalization` shapes rewards, sums them to returns, and centres and scales them: RLOO's baseline is here.
`kl` estimates KL divergences from logprobs and adapts the coefficient of a KL term.
`loss` holds the policy loss: ratio, clip, behaviour_weight, token mask and token weights.
`diagnostics` turns the token outcomes of a train step into metrics.

Import the modules, not this package: `intake` reads `staleness` and must not import torch.
"""
