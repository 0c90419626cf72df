"""The learner: takes batches from the intake, trains, publishes weights, and writes records and checkpoints.

The hot path, in order: `loop`, `turn`, `ahead`, `train_step`, `advantages`, `packing`, `team`, `rank`, `optimizer`;
`parallel` connects the ranks of several processes. `own_weights` asks the user's function for a factor of each sample.
Around the hot path: `__main__` is the process. `building` makes a rank and its `adapters`. `checkpoint`, `reporting`,
`recording` and `batches` write files; `state` is the part of a checkpoint without tensors, `checkpoint_folder` has the
names of checkpoints, `stretches` the configs of a run; `resuming` goes on from a checkpoint with changed options.
`memory` is an estimate, `costs` counts arithmetic. `collector` keeps Python's collector from stopping the loop. `lock`
keeps a second learner out of a run folder. `warm_start` makes the tiny model in a process before the run, by
`demonstrations`.

The package imports a public name on first use: `warm_start` must not wait for torch.
"""

from typing import TYPE_CHECKING

from areal_rloo.exports import exports_of

if TYPE_CHECKING:
    from areal_rloo.learner.advantages import Advantages, Masks, Samples, compute_advantages, loss_masks
    from areal_rloo.learner.building import build_rank
    from areal_rloo.learner.packing import Microbatch, PackedBatch, Row, RowLoss, pack
    from areal_rloo.learner.rank import LearnerRank
    from areal_rloo.learner.team import Team
    from areal_rloo.learner.train_step import StepResult, TrainStep

__all__ = [
    "Advantages",
    "LearnerRank",
    "Masks",
    "Microbatch",
    "PackedBatch",
    "Row",
    "RowLoss",
    "Samples",
    "StepResult",
    "Team",
    "TrainStep",
    "build_rank",
    "compute_advantages",
    "loss_masks",
    "pack",
]

__getattr__ = exports_of(__name__)
