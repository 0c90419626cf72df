"""The mathematics alone, on tensors and integers: no models, no processes, no files.

In the order of a step: `staleness` (needs no torch), `normalization`, `kl`, `behaviour_weight`, `loss`, `diagnostics`.
Import the modules, not this package: `intake` reads `staleness` and must not import torch.
"""
