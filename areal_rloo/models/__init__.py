"""Policies as torch modules, and model folders.

`folder` checks a model folder on disk without torch; `files` reads tokenizer and stop tokens without building a model.
`loading` loads a trainable causal language model, and keeps a frozen reference policy. `tiny` makes the built-in tiny
model.
`policy` wraps a model for the learner: packed rows in, logprobs or a loss out, without all logits in memory.
`attention` describes where the sequences of a packed row are, and attends within each of them.

Import the modules, not this package: the launcher reads `folder` and must not wait for torch.
"""
