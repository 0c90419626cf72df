"""The training loop beside its train steps."""

import contextlib
import weakref
from types import SimpleNamespace
from typing import Any

from areal_rloo.learner.loop import Learner


class _Group:
    pass


class _Intake:
    """Gives a batch, and looks whether anything holds it at the next call."""

    draining = True

    def __init__(self) -> None:
        self.given: weakref.ref[_Group] | None = None
        self.is_free = False
        self.upcoming: Any = None

    def take_batch(self) -> list[Any] | None:
        if self.given is not None:
            self.is_free = self.given() is None
            return None
        group = _Group()
        self.given = weakref.ref(group)
        return [group]

    def statistics(self) -> None:
        pass


class _Trained(Learner):
    def _train(self, batch: list[Any], wait_s: float) -> None:
        self.policy_version += 1


def test_a_learner_that_waits_holds_no_sample_of_the_last_step() -> None:
    """The intake frees them a few at a time. With the batch, all would go at once, and no thread runs meanwhile."""
    intake, anything = _Intake(), SimpleNamespace
    totals = anything(learner_idle_s=0.0, generated_tokens=0)
    unused: Any = None
    learner = _Trained(
        config=anything(learner=anything(num_train_steps=9), checkpoint=anything(at_end=False)),  # type: ignore[arg-type]
        train_step=unused,
        tokenizer=unused,
        intake=intake,  # type: ignore[arg-type]
        broadcaster=unused,
        reporter=anything(totals=totals, update_totals=lambda _: None, waiting=contextlib.nullcontext),  # type: ignore[arg-type]
        recorder=unused,
        batches=None,
        checkpoints=anything(wait=lambda: True),  # type: ignore[arg-type]
        turn=contextlib.nullcontext(),
        policy_version=0,
    )
    assert learner.run() == "drained"
    assert intake.is_free
