"""areal_rloo: asynchronous, decoupled actor-learner RL post-training of language models.

Beside the packages: `trajectory` and `errors` are the nouns and the exception tree; `files` writes atomically and
locks; `ports` reserves ports; `waiting` waits for conditions; `parent_death` ends processes whose parent died;
`children` reads the exit code of a child without reaping the child.
"""

__version__ = "0.1.0"
