"""Policies as torch modules (`policy`, `attention`), and model folders (`folder`, `files`, `loading`, `tiny`).

Import the modules, not this package: the launcher reads `folder` and must not wait for torch.
"""
