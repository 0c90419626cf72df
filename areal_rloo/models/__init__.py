"""Policies as torch modules (`policy`, `attention`, `capped_attention`, `head`), model folders (`folder`, `files`,
`loading`, `tiny`), the check of a family against transformers (`equality`), sizes of models (`sizes`), and fingerprints
of weights (`fingerprint`).

Import the modules, not this package: the launcher reads `folder` and `sizes`, and must not wait for torch.
"""
