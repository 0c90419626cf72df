"""Policies as torch modules (`policy`, `attention`, `head`), model folders (`folder`, `files`, `loading`, `tiny`), and
fingerprints of weights (`fingerprint`).

Import the modules, not this package: the launcher reads `folder` and must not wait for torch.
"""
