"""Engines turn token ids into completions; `base.py` is what each of them promises."""
