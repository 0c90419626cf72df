"""The nouns that travel through the whole system: completions, trajectories, groups.

Made by an engine (`Completion`), scored by a rollout worker (`Trajectory`), collected by the learner (`Group`).
Nothing here waits for anything, and nothing here imports numpy at run time, so that a launcher can use it anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

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


class Completion(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The tokens sampled after a prompt, with what is known of each; all arrays have shape [num_tokens].

    Attributes:
        tokens: int32 token ids, the stop token included where one ended the completion.
        behaviour_logprobs: float32 log probability of each token under the distribution it was sampled from.
        versions: int32 policy version that sampled each token; it never decreases along a completion.
        finish_reason: why it ended.
    """

    tokens: Int32Array
    behaviour_logprobs: Float32Array
    versions: Int32Array
    finish_reason: FinishReason


class Trajectory(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A prompt, one completion of it, and its reward. `prompt_tokens` is int32 of shape [num_prompt_tokens]."""

    group_id: int
    sample_index: int
    prompt_tokens: Int32Array
    completion: Completion
    reward: float

    @property
    def sample_id(self) -> SampleId:
        return (self.group_id, self.sample_index)

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return len(self.prompt_tokens) + len(self.completion.tokens)


class Group(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The finished trajectories of one prompt, ordered by sample index; the unit of the baseline.

    Attributes:
        group_id: names the group in the whole run; also the order of admission.
        deadline: the last policy version at which training on it respects `max_staleness` for every token.
        trajectories: fewer than `group_size` where samples were dropped.
    """

    group_id: int
    deadline: int
    trajectories: tuple[Trajectory, ...]
