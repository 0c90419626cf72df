"""Holds the answers of workers against their leases. An answer that no honest worker can send is a lie.

A lie costs its own sample, which is leased again. After a few lies, the learner takes no message of this process any
more, and the process ends; its next start is trusted anew. Late and repeated answers are no lies: messages are lost,
and workers are taken for dead. tests/simulation finds no schedule in which an honest worker lies.

The learner knows the holder, the prompt, the vocabulary, and the possible versions of every answer. It cannot know if a
logprob or a reward is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from areal_rloo.config import Config
from areal_rloo.errors import DecodeError
from areal_rloo.intake.ledger import Grant, Sample
from areal_rloo.intake.prompts import Prompt
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.telemetry.words import Words
from areal_rloo.trajectory import Trajectory
from areal_rloo.wire.columns import Int32Array
from areal_rloo.wire.messages import Duty, Finished, Results
from areal_rloo.wire.peers import MOST_OFFENCES, Offences
from areal_rloo.wire.turns import decode_turns

logger = get_logger(__name__)

Lie = Literal[
    "no_such_lease",  # the learner never granted this lease, or not for this sample
    "not_the_holder",  # the learner granted this lease to another worker
    "versions",  # below the lease's, or not published yet
    "vocabulary",  # a token that the model does not have
    "prompt",  # not the lease's
    "length",  # more tokens than the sampling allows
    "shape",  # too many trajectories, or spans, that the episode cannot make
    "unreadable",  # a partial rollout
]

_MOST_NAMES = 1000  # of workers with lies


class LieStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start of the learner."""

    metrics_prefix: ClassVar[str] = "intake_"

    refused_answers: Annotated[
        dict[str, int],
        Metric("Answers refused because their lease does not allow them", kind="counter", label="reason"),
    ]
    refused_by_worker: Annotated[dict[str, int], Metric("The same, by worker", kind="counter", label="worker")]
    cut_off: Annotated[
        int, Metric("Processes of workers cut off after refused answers", kind="counter", healthy=(0, 0))
    ]


class Lies:
    """The rules for answers, and the lies so far."""

    def __init__(self, config: Config, *, vocab_size: int) -> None:
        """`vocab_size`: rows of the model's embedding. An id beyond those of the tokenizer can be sampled, too."""
        episode = config.rollout.episode
        self._vocab_size = vocab_size
        self._is_built_in = episode.built_in  # a user's episode makes trajectories of any shape
        self._has_prompt = episode.has_prompt
        self._is_single_turn = {each.type for each in (episode, *config.episodes.values())} == {"single_turn"}
        self._most_tokens, self._partial_tokens = config.context_tokens, config.partial_tokens
        self.max_row_tokens = config.learner.microbatch_tokens  # of the learner
        self._most_trajectories = episode.most_trajectories
        self._reasons: Counter[str] = Counter()
        self._workers: Counter[str] = Counter()
        self._names = Words(_MOST_NAMES)
        self._peers = Offences()

    def about_lease(
        self, duty: Duty, sample: Sample | None, grant: Grant | None, worker_id: str, *, granted: bool
    ) -> Lie | None:
        """Return what is wrong with the duty of an answer: its lease is not the worker's.

        Args:
            sample: None if the sample has an outcome, or never was.
            grant: the lease of the sample; None if the sample has no such lease.
            granted: False if the learner cannot have granted this duty.
        """
        if grant is not None:
            return None if grant.worker_id == worker_id else "not_the_holder"
        if not granted or (sample is not None and sample.remembers(duty.lease_id)):
            return "no_such_lease"
        return None

    def lowest_plain_version(
        self, results: Results, policy_version: int, prompt_of: Callable[[int], Prompt | None]
    ) -> int | None:
        """Look at all answers of a message together: a third of the work of a look at each.

        Args:
            policy_version: the newest published.
            prompt_of: returns the prompt of a group, or None.

        Returns: the lowest version of the tokens if all answers are plain: a row of the learner holds each, and
            `in_trajectories` finds nothing wrong with them if the lowest version of their lease is not higher. None if
            some answer is not plain.
        """
        if results.extremes is None:
            return None
        highest_token, lowest_version, highest_version, most_tokens, _, has_spans, has_even_spans = results.extremes
        is_long = most_tokens - 1 > self.max_row_tokens  # as in `longest_row`
        if highest_token >= self._vocab_size or highest_version > policy_version or is_long:
            return None
        has_strange_spans = has_spans if self._is_single_turn else has_even_spans
        if self._is_built_in and (most_tokens > self._most_tokens or has_strange_spans):
            return None
        if self._has_prompt:
            return lowest_version if _have_prompts(results.finished, prompt_of) else None
        if any(len(each.trajectories) > self._most_trajectories for each in results.finished):
            return None
        return lowest_version

    def in_trajectories(
        self, trajectories: Sequence[Trajectory], grant: Grant, prompt: Prompt, policy_version: int
    ) -> Lie | None:
        """Return what is wrong with the trajectories of a lease. `policy_version`: the newest published."""
        lies = (self._in_trajectory(each, grant, prompt, policy_version) for each in trajectories)
        if (lie := next((lie for lie in lies if lie is not None), None)) is not None:
            return lie
        return "shape" if self._has_strange_shape(trajectories) else None

    def in_partial(self, turns: bytes, *, grant: Grant, policy_version: int) -> Lie | None:
        """Return what is wrong with a partial rollout, encoded as in `wire.turns`."""
        try:
            completions = [turn.completion for turn in decode_turns(turns)]
        except DecodeError:
            return "unreadable"
        if sum(len(completion.tokens) for completion in completions) > self._partial_tokens:
            return "length"
        for completion in completions:
            if len(completion.tokens) == 0:
                continue
            if completion.versions[0] < grant.min_version or completion.versions[-1] > policy_version:
                return "versions"
            if completion.tokens.max() >= self._vocab_size:
                return "vocabulary"
        return None

    def count(self, lie: Lie, *, peer: str, worker_id: str, duty: Duty) -> None:
        """Count a lie of a peer that has said Hello as this worker."""
        self._reasons[lie] += 1
        self._workers[self._names.label(worker_id)] += 1
        number = self._peers.count(peer)
        if number <= MOST_OFFENCES:
            logger.error(
                "refuse an answer of %s to lease %d, sample %s: %s", worker_id, duty.lease_id, duty.sample_id, lie
            )
        if number == MOST_OFFENCES:
            logger.error(
                "%s sent %d answers that its leases do not allow: its messages are read no more, and the process ends. "
                "Does its host have another areal_rloo, another model, or faulty memory?",
                *(worker_id, MOST_OFFENCES),
            )

    def is_cut_off(self, peer: str) -> bool:
        """Return True if this peer lied too often."""
        return self._peers.is_cut_off(peer)

    def statistics(self) -> LieStatistics:
        return LieStatistics(
            refused_answers=dict(self._reasons),
            refused_by_worker=dict(self._workers),
            cut_off=self._peers.num_cut_off,
        )

    def _in_trajectory(self, trajectory: Trajectory, grant: Grant, prompt: Prompt, policy_version: int) -> Lie | None:
        versions = trajectory.completion.versions  # never decrease: the codec checks this
        if max(trajectory.prompt_tokens.max(), trajectory.completion.tokens.max()) >= self._vocab_size:
            return "vocabulary"
        if versions[0] < grant.min_version or versions[-1] > policy_version:
            return "versions"
        if self._is_built_in and trajectory.num_tokens > self._most_tokens:
            return "length"
        if self._has_prompt and trajectory.prompt_tokens.tobytes() != prompt.encoded:
            return "prompt"
        return None

    def _has_strange_shape(self, trajectories: Sequence[Trajectory]) -> bool:
        if len(trajectories) > self._most_trajectories:
            return True
        if not self._is_built_in:
            return False
        spans = [each.completion.spans for each in trajectories if each.completion.spans]
        return any(self._is_single_turn or len(lengths) % 2 == 0 for lengths in spans)  # the policy has the last word


def _have_prompts(finished: Sequence[Finished], prompt_of: Callable[[int], Prompt | None]) -> bool:
    """Return True if each answer is a trajectory with the prompt of its group."""
    group_id: int | None = None
    right: Int32Array | None = None  # the prompt of the group: the codec makes equal prompts the same array
    for _, trajectories in finished:
        first = trajectories[0]
        if len(trajectories) != 1:
            return False
        if first.prompt_tokens is not right or first.group_id != group_id:
            group_id, right, prompt = first.group_id, first.prompt_tokens, prompt_of(first.group_id)
            if prompt is None or right.tobytes() != prompt.encoded:
                return False
    return True
