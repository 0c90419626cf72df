"""The nouns that travel through the whole system: items, completions, trajectories, groups.

Made by a task (`Item`), an engine (`Completion`), scored by a rollout worker (`Trajectory`), collected by the learner
(`Group`).
Nothing here waits for anything, and nothing here imports numpy at run time, so that a launcher can use it anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]
    Float32Array = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: a stop token, the token limit, or an abort. Said by the engine, never guessed."""

SampleId = tuple[int, int]
"""(group_id, sample_index): names one trajectory in the whole run."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a function in an assistant's message.

    Attributes:
        id: what the tool's message names it by.
        name: of the function.
        arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation.

    Attributes:
        role: who says it.
        content: what is said, without the calls.
        tool_calls: the functions an assistant's message calls.
        tool_call_id: the call whose result a tool's message is; None where the format has no ids.
        name: of who says it, or of the tool; None where none was given.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Item(msgspec.Struct, frozen=True):
    """One item of a task.

    Attributes:
        prompt: a text, or the messages of a conversation that the policy is to go on with.
        answer: what a reward compares the completion with.
        source: label of the data source it is of; its rewards are those that count.
        fields: everything else that its row says, for rewards that read it.
    """

    prompt: str | tuple[Message, ...]
    answer: str = ""
    source: str = ""
    fields: dict[str, Any] = {}

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as a conversation; a text is what a user says."""
        return (Message("user", self.prompt),) if isinstance(self.prompt, str) else self.prompt

    @property
    def plain_messages(self) -> list[dict[str, str]]:
        """The messages as role and content, as chat templates, endpoints and functions take them."""
        return [{"role": message.role, "content": message.content} for message in self.messages]

    @property
    def text(self) -> str:
        """The prompt as one text, for records and comparisons."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message.role}: {message.content}" for message in self.prompt)


class Completion(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The tokens sampled after a prompt, with what is known of each; all arrays have shape [num_tokens].

    Attributes:
        tokens: int32 token ids, the stop token included where one ended the completion.
        behaviour_logprobs: float32 log probability of each token under the distribution it was sampled from.
        versions: int32 policy version that sampled each token; it never decreases along a completion.
        finish_reason: why it ended.
        spans: how many tokens in a row the policy sampled, how many after them somebody else wrote (a tool, a user),
            and so on in turn; empty where all are the policy's. What somebody else wrote has behaviour logprob 0 and
            the version of the token before it.
    """

    tokens: Int32Array
    behaviour_logprobs: Float32Array
    versions: Int32Array
    finish_reason: FinishReason
    spans: tuple[int, ...] = ()


class Trajectory(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A prompt, one completion of it, and its reward.

    Attributes:
        group_id: names the group in the whole run; evaluation has negative ones.
        sample_index: names the sample in its group. An episode may give several trajectories of one sample.
        prompt_tokens: int32 of shape [num_prompt_tokens].
        completion: what came after.
        reward: of the sample; its trajectories all carry the same.
        reward_parts: what the reward is the weighted sum of, by label.
        token_rewards: float32 of shape [num_completion_tokens], the share of the reward that single tokens earned; None
            where all of it is the trajectory's.
        answer: the final answer, so that equal ones can be counted; None where the task knows of none.
    """

    group_id: int
    sample_index: int
    prompt_tokens: Int32Array
    completion: Completion
    reward: float
    reward_parts: dict[str, float] = {}
    token_rewards: Float32Array | None = None
    answer: str | None = None

    @property
    def sample_id(self) -> SampleId:
        return (self.group_id, self.sample_index)

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return len(self.prompt_tokens) + len(self.completion.tokens)


class Group(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The finished samples of one prompt, ordered by sample index; the unit of the baseline.

    Attributes:
        group_id: names the group in the whole run; also the order of admission.
        deadline: the last policy version at which training on it respects `max_staleness` for every token.
        source: label of the data source its prompt is of.
        epoch: which pass through that source.
        item_index: which item of all sources.
        trajectories: those of a sample stand together; fewer samples than `group_size` where some were dropped.
    """

    group_id: int
    deadline: int
    trajectories: tuple[Trajectory, ...]
    source: str = ""
    epoch: int = 0
    item_index: int = 0

    @property
    def samples(self) -> list[Trajectory]:
        """The first trajectory of each sample, which has its reward."""
        return list({trajectory.sample_index: trajectory for trajectory in reversed(self.trajectories)}.values())[::-1]
