"""Policies as torch modules: loading, packed attention, logprobs, the built-in tiny model."""
