"""The learner: takes batches from the intake, trains, publishes weights, and writes records and checkpoints.

The hot path, in order:
`loop` is the training loop: take a batch, step, publish, report, checkpoint.
`train_step` turns a batch into minibatches of weighted tokens, has all ranks train, and collects the numbers.
`advantages` chooses the tokens in the loss, and computes the advantage of each token of a batch.
`packing` packs trajectories into rows without padding and computes the loss of a row.
`rank` is a rank: policy, optimizer, forward and backward passes.
`team` is all ranks as rank 0 sees them, with the messages between them.
`optimizer` builds AdamW and the schedule.
`parallel` connects the ranks and shards the policy over them (torch.distributed).

Around the hot path:
`__main__` is the process: starts every part, resumes, drains.
`building` builds a rank from the config; `adapters` adds LoRA and merges adapters into the weights.
`checkpoint` writes and restores the full state of a run, and writes model folders.
`reporting` writes records, totals and the summary; `recording` writes trained trajectories to files.
`costs` counts arithmetic, and explains out-of-memory errors; `lock` keeps a second learner out of a run folder.
`warm_start` makes the tiny model in a process before the run; `demonstrations` trains that model on demonstrations.

Import the modules, not this package: `warm_start` must not wait for torch.
"""
