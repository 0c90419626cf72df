"""Turn the sources of a config into examples for `areal-rloo sft`: items of tasks in, trajectories of reward 1 out.

The prompt and the turns of a demonstration become token ids as in a rollout (`tasks/chat.py`). Tokens of the assistant,
with the end of each turn, are spans of the policy, so only these are in the loss. Runs on the main thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from areal_rloo.config import Config
from areal_rloo.errors import DataError, UserError, raised
from areal_rloo.learner.advantages import policy_tokens
from areal_rloo.stages.saved_samples import check_tokenizer, read_sample, trajectory_of
from areal_rloo.tasks import Item, Message, Source, Task, load_eval, load_train, make_task
from areal_rloo.tasks.chat import ChatFormat, kept
from areal_rloo.tasks.demonstrations import is_sample
from areal_rloo.tasks.loading import eval_sources
from areal_rloo.trajectory import Completion, Trajectory

_CHECKED = 8  # samples of a source whose tokens are compared with their text


class Examples(NamedTuple):
    """Examples of a source of the config."""

    label: str
    weight: float | None
    trajectories: list[Trajectory]
    num_left_out: int  # too long under `data.overlong_prompts: filter`

    def words(self) -> str:
        learned = sum(int(policy_tokens(each).sum()) for each in self.trajectories)
        longest = max(each.num_tokens for each in self.trajectories)
        words = f"{self.label}: {len(self.trajectories):,} examples, {learned:,} tokens to learn, the longest "
        return f"{words}example {longest:,} tokens" + (f"; left out: {self.num_left_out:,}" * (self.num_left_out > 0))


class Encoder:
    """Encodes demonstrations within `data.max_prompt_tokens` and `rollout.sampling.max_new_tokens`."""

    def __init__(self, config: Config, chat: ChatFormat, *, vocab_size: int) -> None:
        self._chat, self._vocab_size = chat, vocab_size
        self._rule = config.data.overlong_prompts
        self._most = {
            "data.max_prompt_tokens": config.data.max_prompt_tokens,
            "rollout.sampling.max_new_tokens": config.rollout.sampling.max_new_tokens,
        }

    def demonstration(self, task: Task, item: Item, where: str) -> Trajectory | None:
        """Encode the demonstration of an item; None for an example to leave out.

        Raises:
            DataError: the task has no demonstration, or it is too long under `data.overlong_prompts: error`.
        """
        try:
            turns = task.turns(item)
            is_learned = bool(turns) and all(turn.content or turn.tool_calls for turn in turns)
        except UserError:
            raise
        except Exception as error:  # a task may be the user's code
            raise DataError(f"{where}: no demonstration can be made: {raised(error)}") from error
        if not is_learned:
            raise DataError(f"{where}: expected a text to learn, the row's or the task's answer, got an empty one")
        tokens, spans = self._turns(turns)
        completion = Completion(
            np.array(tokens, np.int32),
            np.zeros(len(tokens), np.float32),
            np.zeros(len(tokens), np.int32),
            "stop",
            tuple(spans) if len(spans) > 1 else (),
        )
        return self._within(Trajectory(0, 0, np.array(self._chat.prompt(item), np.int32), completion, 1.0), where)

    def sample(self, item: Item, where: str, *, checked: bool) -> Trajectory | None:
        """Take the tokens of a row of `areal-rloo generate`; None for an example to leave out."""
        sample = read_sample(item.fields, where, vocab_size=self._vocab_size)
        if checked:
            check_tokenizer(sample, where, self._chat)
        return self._within(msgspec.structs.replace(trajectory_of(sample), sample_index=0, reward=1.0), where)

    def _turns(self, turns: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Encode turns that begin and end with the assistant; return tokens, and the lengths of alternating spans."""
        tokens, spans, between = list[int](), list[int](), list[Message]()
        for turn in turns:
            if turn.role != "assistant":
                between.append(turn)
                continue
            if between:
                spans.append(len(more := self._chat.between(between, last_token=tokens[-1])))
                tokens += more
                between = []
            spans.append(len(own := self._chat.turn(turn)))
            tokens += own
        return tokens, spans

    def _within(self, example: Trajectory, where: str) -> Trajectory | None:
        """Apply `data.overlong_prompts` to a prompt, and likewise to a completion, whose first tokens are kept."""
        prompt, completion = example.prompt_tokens, example.completion
        (key, most_prompt), (new_key, most_new) = self._most.items()
        for name, most, tokens in ((key, most_prompt, prompt), (new_key, most_new, completion.tokens)):
            if len(tokens) <= most:
                continue
            if self._rule == "filter":
                return None
            if self._rule == "error":
                raise DataError(
                    f"{name}: expected at most {most}, got {len(tokens)} tokens for {where}; raise it, or set "
                    "data.overlong_prompts to filter or truncate_left"
                )
        if len(prompt) > most_prompt:
            prompt = prompt[kept(len(prompt), most_prompt, self._rule)]
        if len(completion.tokens) > most_new:
            ends = np.minimum(np.cumsum(completion.spans), most_new)
            spans = tuple(length for length in np.diff(ends, prepend=0).tolist() if length)
            tokens, logprobs, versions = completion.tokens, completion.behaviour_logprobs, completion.versions
            parts = (tokens[:most_new], logprobs[:most_new], versions[:most_new])
            completion = Completion(*parts, "length", spans)
        return msgspec.structs.replace(example, prompt_tokens=prompt, completion=completion)


def load_examples(config: Config, encoder: Encoder) -> tuple[list[Examples], list[Examples]]:
    """Load and encode all examples of the train sources and of the evaluation sets.

    Raises:
        DataError: data cannot be read, an example is wrong, or no example of a source is short enough.
    """
    data, seed = config.data, config.run.seed
    train = zip(data.keyed_train_sources, load_train(data, seed=seed), strict=True)
    held_out = zip(eval_sources(data), load_eval(data, seed=seed), strict=True)
    of_train, of_eval = (
        [_encoded(key, make_task(key, configured, seed=seed), source, encoder) for (key, configured), source in split]
        for split in (train, held_out)
    )
    return of_train, of_eval


def _encoded(key: str, task: Task, source: Source, encoder: Encoder) -> Examples:
    """Encode the items of a source."""
    trajectories: list[Trajectory] = []
    for index, item in enumerate(source.items):
        where = f"{key}: item {index + 1} ({item.text[:60]!r})"
        if is_sample(item.fields):
            example = encoder.sample(item, where, checked=len(trajectories) < _CHECKED)
        else:
            example = encoder.demonstration(task, item, where)
        if example is not None:
            trajectories.append(example)
    if not trajectories:
        raise DataError(
            f"{key}: none of {len(source.items)} examples is within data.max_prompt_tokens and "
            "rollout.sampling.max_new_tokens; raise them, or set data.overlong_prompts=truncate_left"
        )
    return Examples(source.label, source.weight, trajectories, len(source.items) - len(trajectories))
