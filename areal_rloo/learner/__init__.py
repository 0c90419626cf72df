"""The learner: takes batches from the intake, trains, publishes weights, and writes records and checkpoints.

The hot path, in order: `loop`, `turn`, `train_step`, `advantages`, `packing`, `team`, `rank`, `optimizer`; `parallel`
connects the ranks of several processes. Around the hot path: `__main__` is the process. `building` makes a rank and
its `adapters`. `checkpoint`, `reporting`, `recording` and `batches` write files; `state` is the part of a checkpoint
without tensors, `checkpoint_folder` has the names of checkpoints, `stretches` the configs of a run; `resuming` goes on
from a checkpoint with changed options. `memory` is an estimate, `costs` counts arithmetic. `lock` keeps a second
learner out of a run folder. `warm_start` makes the tiny model in a process before the run, by `demonstrations`.

Import the modules, not this package: `warm_start` must not wait for torch.
"""
