"""The data types of the whole system: items, completions, trajectories and groups.

A task makes an `Item`, an engine a `Completion`, a rollout worker a `Trajectory`, and the learner a `Group`. This
module imports no numpy at run time, so that a launcher can use these types anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]
    Float32Array = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: a stop token, the token limit, or an abort. The engine reports the reason."""

MOST_REWARD = 1e12
"""Largest size of a reward: sums of squares of many rewards stay finite in float32."""


def is_reward(number: float) -> bool:
    """Return True for a number that a reward, or a part of one, may be; NaN is none."""
    return abs(number) <= MOST_REWARD


SampleId = tuple[int, int]
"""(group_id, sample_index): names a sample in the whole run."""

Purpose = Literal["train", "eval"]
"""Evaluation samples are pinned to a version, sampled as their set says, and stay outside the ledger."""


def purpose_of(group_id: int) -> Purpose:
    """Return the purpose of a group: evaluation groups have negative ids. No other place knows this rule."""
    return "train" if group_id >= 0 else "eval"


class ToolCall(msgspec.Struct, frozen=True):
    """A function call in an assistant's message."""

    id: str  # the tool's message refers to this identifier
    name: str
    arguments: str  # a JSON object


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str  # without the function calls
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant's message
    tool_call_id: str | None = None  # of the call that a tool's message answers; None if the format has no identifiers
    name: str | None = None  # of the speaker or the tool


class Item(msgspec.Struct, frozen=True):
    """An item of a task."""

    prompt: str | tuple[Message, ...]  # a text, or a conversation that the policy continues
    answer: str = ""  # the expected answer, for rewards
    source: str = ""  # label of the data source, which decides the rewards
    fields: dict[str, Any] = {}  # all other fields of the row, for rewards

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as a conversation; a text becomes a user message."""
        return (Message("user", self.prompt),) if isinstance(self.prompt, str) else self.prompt

    @property
    def plain_messages(self) -> list[dict[str, str]]:
        """The messages as role and content, the form for chat templates, endpoints and functions."""
        return [{"role": message.role, "content": message.content} for message in self.messages]

    @property
    def text(self) -> str:
        """The prompt as a single text, for records and comparisons."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message.role}: {message.content}" for message in self.prompt)


class Completion(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The tokens sampled after a prompt; all arrays have shape [num_tokens]."""

    tokens: Int32Array  # ids, including the stop token that ended the completion, if any
    behaviour_logprobs: Float32Array  # log probability of each token under the sampling distribution
    versions: Int32Array  # policy version that sampled each token; never decreases along a completion
    finish_reason: FinishReason
    # Lengths of alternating spans: first tokens of the policy, then tokens of a tool or user, and so on. Empty if the
    # policy sampled all tokens. Tokens of a tool or user have behaviour logprob 0 and the preceding token's version.
    spans: tuple[int, ...] = ()


class Trajectory(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A prompt, a completion, and the reward."""

    group_id: int  # identifies the group in the whole run (see `purpose_of`)
    sample_index: int  # identifies the sample in the group; an episode may give several trajectories of a sample
    prompt_tokens: Int32Array  # [num_prompt_tokens]
    completion: Completion
    reward: float  # of the sample; all trajectories of a sample have the same reward
    reward_parts: dict[str, float] = {}  # label to value; the reward is the weighted sum of these parts
    token_rewards: Float32Array | None = None  # [num_completion_tokens]; None: the trajectory's reward is the only one
    answer: str | None = None  # the final answer, for majority votes; None if the task extracts no answer

    @property
    def sample_id(self) -> SampleId:
        return (self.group_id, self.sample_index)

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return len(self.prompt_tokens) + len(self.completion.tokens)


def longest_row(trajectories: Iterable[Trajectory]) -> int:
    """Return the tokens of the longest as a row of the learner; the last token of a row predicts nothing."""
    return max([trajectory.num_tokens for trajectory in trajectories], default=1) - 1


class Group(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The finished samples of a prompt, ordered by sample index; the unit of the baseline."""

    group_id: int  # identifies the group in the whole run; ids follow the order of admission
    deadline: int  # last policy version at which training on the group respects `max_staleness` for every token
    trajectories: tuple[Trajectory, ...]  # ordered by sample; fewer samples than `group_size` if some were dropped
    source: str = ""  # label of the prompt's data source
    epoch: int = 0  # number of the pass through this source
    item_index: int = 0  # among the items of all sources
    answer: str = ""  # the expected one, for people; empty for a group from a file

    @property
    def samples(self) -> list[Trajectory]:
        """The first trajectory of each sample."""
        return list({trajectory.sample_index: trajectory for trajectory in reversed(self.trajectories)}.values())[::-1]
