"""Policies as torch modules (`policy`, `attention`, `capped_attention`, `head`), model folders (`folder`, `files`,
`hub`, `stored`, `loading`, `tiny`), the check of a family against transformers (`equality`), sizes of models (`sizes`),
fingerprints of weights (`fingerprint`), and the memory and streams of a device (`device`).

Import the modules, not this package: the launcher reads `folder` and `sizes`, and must not wait for torch.
"""
