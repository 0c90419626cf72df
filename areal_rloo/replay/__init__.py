"""`python -m areal_rloo.replay RUN_FOLDER`: runs recorded train steps again, without workers and ports.

In: the batches of a run with `wire.record`, the initial model or a checkpoint, metrics.jsonl. Out: a line for each step
with the recorded and the repeated loss. The run folder stays as it is.

- `__main__`: the command and its table.
- `recording`: the run folder, and which steps can be repeated from where.
- `steps`: builds the learner and feeds the batches to the learner.
"""
