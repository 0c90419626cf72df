"""Go on from a checkpoint with the present options: find the checkpoint, compare the options, fit the ledger.

Runs in the learner's rank 0, before the intake begins.
"""

from __future__ import annotations

from pathlib import Path

from areal_rloo.config import Config, load_config
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.refit import refit
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.learner.state import LearnerState, restore_ledger
from areal_rloo.learner.stretches import CONFIG_NAME, changes_since
from areal_rloo.models.stored import check_base
from areal_rloo.telemetry.logs import TOLD, get_logger

logger = get_logger(__name__)

Restored = tuple[Path, LearnerState]


def newest_checkpoint(checkpoints: Checkpoints, config: Config, *, resume: bool) -> Restored | None:
    """Load the newest whole checkpoint, and log each option that differs; None without a resume or a checkpoint.

    Raises:
        CheckpointError: an option must not change, or no checkpoint can be read.
    """
    if not resume:
        checkpoints.begin()
        return None
    restored = checkpoints.load_newest()
    if restored is None:
        logger.warning("there is no checkpoint yet: start from the beginning")
        return None
    path, state = restored
    for change in changes_since(path, config):
        logger.info("%s", change.line(state.policy_version))
    return restored


def check_model(state: LearnerState, config: Config, folder: Path, found: str) -> None:
    """Raise ModelError if a resume needs the model with which the run began, and `folder` has the digest `found`.

    All weights are in the checkpoint. But engines add adapters to the files, and the initial reference policy is read
    from them.
    """
    reference = config.model.reference
    is_initial = reference is not None and reference.path == "initial" and reference.refresh_every_n_versions is None
    if config.publishes_adapters or (is_initial and config.algorithm.kl.coefficient > 0):
        check_base(state.base, found, folder)


def restored_ledger(restored: Restored, stream: PromptStream, config: Config) -> Ledger:
    """Restore stream and ledger, and fit the live groups to the present options."""
    path, state = restored
    ledger = restore_ledger(state, stream)
    before, num_live = load_config(str(path / CONFIG_NAME)), len(ledger.groups)
    num_dropped = refit(
        ledger, before=before, now=config, policy_version=state.policy_version, give_back=stream.give_back
    )
    if num_dropped:
        text = (
            "resume: %d of %d groups under way do not fit the changed options and are dropped; their prompts come again"
        )
        logger.log(TOLD, text, num_dropped, num_live)
    return ledger
