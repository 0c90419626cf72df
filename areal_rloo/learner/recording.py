"""Write single trajectories to trajectories.jsonl, for people who want to read samples of a run.

Of each step: a few groups, spread over the batch, with their advantages; and the samples dropped since the last step
(the ledger keeps the last few hundred). The training thread makes the records between two steps, and a separate thread
writes them: to thin out a large file takes seconds. A full disk costs records only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from areal_rloo.config import TelemetryConfig
from areal_rloo.intake.prompts import Prompt
from areal_rloo.intake.work import Drop
from areal_rloo.learner.advantages import Advantages, Masks
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.trajectories import TrajectoryFile, TrajectoryRecord
from areal_rloo.trajectory import Completion, Group, SampleId, Trajectory

logger = get_logger(__name__)

_MOST_EXPECTED = 2000  # characters of an expected answer: code tasks have all tests there
_DECIMALS = 5  # of logprobs and advantages: enough for a reader, and the file stays small
_NOTHING = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "stop")


class Recorder:
    """Chooses trajectories and appends their records to the file."""

    def __init__(self, path: Path, tokenizer: Any, config: TelemetryConfig) -> None:
        """`trajectories_per_step`: about how many of a batch; 0 writes nothing, and no dropped samples either."""
        self._num_wanted = config.trajectories_per_step
        self._file = TrajectoryFile(path, most_bytes=config.most_trajectories_bytes) if self._num_wanted else None
        self._records = RecordMaker(tokenizer)
        self._num_lost = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trajectories")
        self._written: Future[None] | None = None

    def step(
        self,
        batch: Sequence[Group],
        masks: Masks,
        advantages: Advantages,
        drops: Iterable[Drop],
        *,
        policy_version: int,
    ) -> None:
        """Write trajectories of a step at this version, and the samples dropped since the last step."""
        trained = self._trained(batch, masks, advantages, policy_version)
        self._append(chain(trained, self._dropped(drops, policy_version)))

    def close(self, drops: Iterable[Drop], *, policy_version: int) -> None:
        """Write the samples dropped since the last step, and close the file."""
        try:
            self._append(self._dropped(drops, policy_version))
            self._wait()
        finally:
            self._writer.shutdown()
            if self._file is not None:
                self._file.close()

    def _append(self, made: Iterable[TrajectoryRecord]) -> None:
        """Write the records while the training thread goes on; wait for the last ones first: few are in memory."""
        if self._file is None:
            return
        records = list(made)
        self._wait()
        self._written = self._writer.submit(self._write, self._file, records)

    def _wait(self) -> None:
        """Wait for the last records. An error is raised once: the next records are written all the same."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _write(self, file: TrajectoryFile, records: Sequence[TrajectoryRecord]) -> None:
        try:
            file.append(records)
        except OSError as error:
            self._num_lost += len(records)
            logger.error("%d records are missing from trajectories.jsonl so far: %s", self._num_lost, error)

    def _trained(
        self, batch: Sequence[Group], masks: Masks, advantages: Advantages, policy_version: int
    ) -> Iterator[TrajectoryRecord]:
        size = max(len(group.trajectories) for group in batch)
        num_groups = min(len(batch), -(-self._num_wanted // size))
        chosen = {index * len(batch) // num_groups for index in range(num_groups)}
        first = 0
        for index, group in enumerate(batch):
            if index in chosen:
                for offset, trajectory in enumerate(group.trajectories):
                    numbers = _training_numbers(trajectory, masks, advantages, first + offset, policy_version)
                    place = _place(policy_version, group.source, group.epoch, group.item_index, group.answer)
                    yield self._records.record(group.trajectories, offset, place, **numbers)
            first += len(group.trajectories)

    def _dropped(self, drops: Iterable[Drop], policy_version: int) -> Iterator[TrajectoryRecord]:
        for drop in drops:
            reason = {"dropped": drop.reason, "detail": drop.detail}
            sample_id = (drop.group_id, drop.sample_index)
            yield from self._records.of_sample(sample_id, drop.trajectories, drop.prompt, policy_version, **reason)


class RecordMaker:
    """Makes records of trajectories; decodes each token once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def of_sample(
        self,
        sample_id: SampleId,
        trajectories: Sequence[Trajectory],
        prompt: Prompt,
        policy_version: int,
        **rest: Any,
    ) -> Iterator[TrajectoryRecord]:
        """Give the records of a sample, which was not trained on; a record without tokens if there is no trajectory."""
        place = _place(policy_version, prompt.item.source, prompt.epoch, prompt.item_index, prompt.item.answer)
        for offset in range(len(trajectories)):
            yield self.record(trajectories, offset, place, **rest)
        if not trajectories:
            lost = Trajectory(*sample_id, np.array(prompt.tokens), _NOTHING, 0.0)
            yield self.record([lost], 0, place, reward=None, finish_reason="", **rest)

    def record(
        self, trajectories: Sequence[Trajectory], index: int, place: dict[str, Any], **rest: Any
    ) -> TrajectoryRecord:
        """Make the record of a trajectory among others; `rest` are fields beyond those of the trajectory itself."""
        trajectory = trajectories[index]
        completion = trajectory.completion
        versions, counts = np.unique(completion.versions, return_counts=True)
        return TrajectoryRecord(
            **place,
            group_id=trajectory.group_id,
            sample_index=trajectory.sample_index,
            part_index=sum(other.sample_id == trajectory.sample_id for other in trajectories[:index]),
            prompt=str(self._tokenizer.decode(trajectory.prompt_tokens.tolist())),
            pieces=[self._piece(token) for token in completion.tokens.tolist()],
            token_ids=completion.tokens.tolist(),
            logprobs=_rounded(completion.behaviour_logprobs),
            versions=[list(pair) for pair in zip(versions.tolist(), counts.tolist(), strict=True)],
            spans=list(completion.spans),
            reward_parts=trajectory.reward_parts,
            **{
                "reward": trajectory.reward,
                "finish_reason": completion.finish_reason,
                **dict.fromkeys(("advantage", "staleness", "dropped")),
                **rest,
            },
        )

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = str(self._tokenizer.decode([token]))
        return self._pieces[token]


def _place(policy_version: int, source: str, epoch: int, item_index: int, answer: str) -> dict[str, Any]:
    half = _MOST_EXPECTED // 2
    expected = answer if len(answer) <= _MOST_EXPECTED else f"{answer[:half]} ... {answer[-half:]}"
    place = {"policy_version": policy_version, "source": source, "epoch": epoch, "item_index": item_index}
    return place | {"expected": expected}


def _training_numbers(
    trajectory: Trajectory, masks: Masks, advantages: Advantages, index: int, policy_version: int
) -> dict[str, Any]:
    by_token, mask = advantages.of_tokens[index].numpy(), masks.of_tokens[index].numpy()
    in_loss, versions = by_token[mask], trajectory.completion.versions
    varies = len(in_loss) > 0 and bool((in_loss != in_loss[0]).any())
    return {
        "advantage": round(float(in_loss.mean()), _DECIMALS) if len(in_loss) else None,
        "advantages": _rounded(by_token) if varies else [],
        "staleness": policy_version - int(versions[mask].min()) if len(in_loss) else None,
        "num_masked_tokens": masks.stale_tokens[index],
    }


def _rounded(values: np.ndarray[Any, np.dtype[np.float32]]) -> list[float]:
    return [round(value, _DECIMALS) for value in values.tolist()]
