"""Writes single trajectories to trajectories.jsonl, for those who want to see what a run is made of.

Of every step a few groups, spread over the batch, with what they were trained with; and the samples that were dropped
meanwhile, the last few hundred of them. The training thread calls it between two steps; a full disk costs records and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from areal_rloo.learner.ledger import Drop
from areal_rloo.learner.train_step import StepResult
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.trajectories import TrajectoryFile, TrajectoryRecord
from areal_rloo.trajectory import Group, Trajectory

logger = get_logger(__name__)

_DECIMALS = 5  # of logprobs and advantages: more cannot be told apart by eye


class _Place(NamedTuple):
    """When and where a trajectory comes from, by field of TrajectoryRecord."""

    policy_version: int
    source: str
    epoch: int
    item_index: int


class Recorder:
    """The file, and which trajectories go into it."""

    def __init__(self, path: Path, tokenizer: Any, *, trajectories_per_step: int) -> None:
        """
        Args:
            path: of trajectories.jsonl; it is made with the first records.
            tokenizer: of the model, to write tokens as text.
            trajectories_per_step: about how many of a batch; 0: nothing at all, dropped samples neither.
        """
        self._num_wanted = trajectories_per_step
        self._file = TrajectoryFile(path) if trajectories_per_step else None
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._num_lost = 0

    def step(self, batch: Sequence[Group], result: StepResult, drops: Iterable[Drop], *, policy_version: int) -> None:
        """Write what a step at this version trained on and what was dropped since the last."""
        self._append(lambda: [*self._trained(batch, result, policy_version), *self._dropped(drops, policy_version)])

    def close(self, drops: Iterable[Drop], *, policy_version: int) -> None:
        """Write what was dropped since the last step, and nothing more."""
        self._append(lambda: list(self._dropped(drops, policy_version)))
        if self._file is not None:
            self._file.close()

    def _append(self, make: Callable[[], list[TrajectoryRecord]]) -> None:
        if self._file is None:
            return
        records = make()
        try:
            self._file.append(records)
        except OSError as error:
            self._num_lost += len(records)
            logger.error("%d records are missing from trajectories.jsonl so far: %s", self._num_lost, error)

    def _trained(self, batch: Sequence[Group], result: StepResult, policy_version: int) -> Iterator[TrajectoryRecord]:
        size = max(len(group.trajectories) for group in batch)
        num_groups = min(len(batch), -(-self._num_wanted // size))
        chosen = {index * len(batch) // num_groups for index in range(num_groups)}
        first = 0
        for index, group in enumerate(batch):
            if index in chosen:
                for offset, trajectory in enumerate(group.trajectories):
                    numbers = _training_numbers(trajectory, result, first + offset, policy_version)
                    place = _Place(policy_version, group.source, group.epoch, group.item_index)
                    yield self._record(group.trajectories, offset, place, **numbers)
            first += len(group.trajectories)

    def _dropped(self, drops: Iterable[Drop], policy_version: int) -> Iterator[TrajectoryRecord]:
        for drop in drops:
            prompt = drop.prompt
            place = _Place(policy_version, prompt.item.source, prompt.epoch, prompt.item_index)
            for offset in range(len(drop.trajectories)):
                yield self._record(drop.trajectories, offset, place, dropped=drop.reason, detail=drop.detail)
            if not drop.trajectories:
                yield TrajectoryRecord(
                    **place._asdict(),
                    group_id=drop.group_id,
                    sample_index=drop.sample_index,
                    prompt=self._text(prompt.tokens),
                    pieces=[],
                    token_ids=[],
                    logprobs=[],
                    versions=[],
                    spans=[],
                    reward=None,
                    reward_parts={},
                    advantage=None,
                    staleness=None,
                    finish_reason="",
                    dropped=drop.reason,
                    detail=drop.detail,
                )

    def _record(self, trajectories: Sequence[Trajectory], index: int, place: _Place, **rest: Any) -> TrajectoryRecord:
        trajectory = trajectories[index]
        completion = trajectory.completion
        versions, counts = np.unique(completion.versions, return_counts=True)
        return TrajectoryRecord(
            **place._asdict(),
            group_id=trajectory.group_id,
            sample_index=trajectory.sample_index,
            part_index=sum(other.sample_id == trajectory.sample_id for other in trajectories[:index]),
            prompt=self._text(trajectory.prompt_tokens.tolist()),
            pieces=[self._piece(token) for token in completion.tokens.tolist()],
            token_ids=completion.tokens.tolist(),
            logprobs=_rounded(completion.behaviour_logprobs),
            versions=[list(pair) for pair in zip(versions.tolist(), counts.tolist(), strict=True)],
            spans=list(completion.spans),
            reward=trajectory.reward,
            reward_parts=trajectory.reward_parts,
            finish_reason=completion.finish_reason,
            **({"advantage": None, "staleness": None, "dropped": None} | rest),
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = str(self._tokenizer.decode([token]))
        return self._pieces[token]


def _training_numbers(trajectory: Trajectory, result: StepResult, index: int, policy_version: int) -> dict[str, Any]:
    advantages, mask = result.advantages[index].numpy(), result.masks[index].numpy()
    in_loss, versions = advantages[mask], trajectory.completion.versions
    varies = len(in_loss) > 0 and bool((in_loss != in_loss[0]).any())
    return {
        "advantage": round(float(in_loss.mean()), _DECIMALS) if len(in_loss) else None,
        "advantages": _rounded(advantages) if varies else [],
        "staleness": policy_version - int(versions[mask].min()) if len(in_loss) else None,
        "num_masked_tokens": int(result.stale_tokens[index]),
    }


def _rounded(values: np.ndarray[Any, np.dtype[np.float32]]) -> list[float]:
    return [round(value, _DECIMALS) for value in values.tolist()]
