"""Policies as torch modules (`policy`, `attention`, `capped_attention`, `head`), model folders (`folder`, `files`,
`hub`, `stored`, `loading`, `tiny`), the checks of a model for the learner (`trainable`), for engines (`served`) and
against transformers (`equality`), sizes of models (`sizes`), fingerprints of weights (`fingerprint`), and the memory
and streams of a device (`device`).

Import the modules, not this package: the launcher reads `folder`, `hub`, `trainable`, `served` and `sizes`, and must
not wait for torch.
"""
