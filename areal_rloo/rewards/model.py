"""A reward model: a sequence classification model with one label, whose logit is the reward.

    score(request) ─► what waits, shortest first, in batches ─► one forward pass a batch, on a thread ─► a logit each

A completion is scored as it would be alone: texts are padded on the right, and attention leaves the padding out. The
text is the model's own chat template over the prompt's messages with the completion (the policy's last turn) as the
assistant's, or the prompt with the completion behind it where the tokenizer has no template. A text beyond the model's
context has no reward: one that was cut would be the reward of something else.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from areal_rloo.errors import ModelError, RewardError, described
from areal_rloo.rewards.request import RewardRequest, WorkStatistics, Worth
from areal_rloo.rewards.values import read_worth

_JOIN_S = 5.0  # that a batch under way has to end


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A completion that somebody waits for."""

    request: RewardRequest
    reward: asyncio.Future[float]


class RewardModel:
    """One model on one device, with one thread. Made and used on one event loop."""

    def __init__(self, path: str, *, key: str, device: str, batch_size: int) -> None:
        """
        Args:
            path: a model folder or a hub name.
            key: where it stands in the config, for errors.
            device: auto (CUDA where there is one), cpu, cuda or cuda:1.
            batch_size: completions in one forward pass.

        Raises:
            ModelError: it cannot be loaded, or is no reward model.
        """
        self._model, self._tokenizer = _loaded(path, key, _device(device, key))
        self._pad_id, self._most_tokens = (
            _pad_id(self._model, self._tokenizer, key),
            _most(self._model, self._tokenizer),
        )
        self._model.config.pad_token_id = self._pad_id  # a decoder takes the last token that is not it
        self._batch_size = batch_size
        self._busy_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._waiting: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()  # None: no more
        self._thread = threading.Thread(target=self._run, name="reward-model", daemon=True)
        self._thread.start()

    async def score(self, request: RewardRequest) -> Worth:
        """The logit of one completion.

        Raises:
            RewardError: it is longer than the model's context, its forward pass failed, or its logit is not finite.
        """
        pending = _Pending(request, self._loop.create_future())
        self._waiting.put(pending)
        return read_worth(await pending.reward, request, returns="trajectory")

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(busy_s=self._busy_s)

    def close(self) -> None:
        """End the thread, after the batch it is at; a pass that hangs ends with the process."""
        self._waiting.put(None)
        self._thread.join(_JOIN_S)

    def _ids(self, request: RewardRequest) -> list[int]:
        if self._tokenizer.chat_template is None:
            ids = self._tokenizer(request.item.text + request.completion, verbose=False)["input_ids"]
        else:
            messages = [*request.item.plain_messages, {"role": "assistant", "content": request.completion}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > self._most_tokens:
            raise RewardError(
                "reward_error",
                f"prompt and completion have {len(ids)} tokens, and the reward model's context {self._most_tokens}; "
                "lower data.max_prompt_tokens or rollout.sampling.max_new_tokens, or take a model with a longer one",
            )
        return list(ids)

    def _run(self) -> None:
        """On the thread: everything that waits by now, shortest first, so that little is padded."""
        while (first := self._waiting.get()) is not None:
            taken = [first]
            closing = False
            while not self._waiting.empty() and not closing:
                following = self._waiting.get()
                closing = following is None
                taken += [] if following is None else [following]
            started_s = time.monotonic()
            texts = [(ids, pending) for pending in taken if (ids := self._ids_or_none(pending)) is not None]
            texts.sort(key=lambda text: len(text[0]))
            for start in range(0, len(texts), self._batch_size):
                self._score(texts[start : start + self._batch_size])
            self._busy_s += time.monotonic() - started_s
            if closing:
                return

    def _ids_or_none(self, pending: _Pending) -> list[int] | None:
        """None where nobody wants it any more, or there is no text to score."""
        if pending.reward.done():
            return None
        try:
            return self._ids(pending.request)
        except RewardError as failure:
            self._loop.call_soon_threadsafe(_fail, pending.reward, failure)
        except Exception as error:  # noqa: BLE001 - a chat template raises what it likes; it drops its sample alone
            self._loop.call_soon_threadsafe(_fail, pending.reward, RewardError("reward_error", described(error)))
        return None

    def _score(self, batch: Sequence[tuple[list[int], _Pending]]) -> None:
        try:
            logits = self._logits([ids for ids, _ in batch])
        except Exception as error:  # noqa: BLE001 - whatever a model's code raises; it drops its sample alone
            if len(batch) > 1:  # one of them, or too many for the memory
                for text in batch:
                    self._score([text])
                return
            failure = RewardError("reward_error", described(error))
            self._loop.call_soon_threadsafe(_fail, batch[0][1].reward, failure)
        else:
            for (_, pending), logit in zip(batch, logits, strict=True):
                self._loop.call_soon_threadsafe(_settle, pending.reward, logit)

    def _logits(self, texts: Sequence[list[int]]) -> list[float]:
        longest = max(map(len, texts))
        ids = torch.tensor([text + [self._pad_id] * (longest - len(text)) for text in texts])
        lengths = torch.tensor([len(text) for text in texts])
        mask = torch.arange(longest) < lengths[:, None]
        device = self._model.device
        with torch.inference_mode():
            logits = self._model(input_ids=ids.to(device), attention_mask=mask.long().to(device)).logits
        return [float(logit) for logit in logits[:, 0].float().tolist()]


def _settle(reward: asyncio.Future[float], logit: float) -> None:
    if not reward.done():
        reward.set_result(logit)


def _fail(reward: asyncio.Future[float], failure: RewardError) -> None:
    if not reward.done():
        reward.set_exception(failure)


def _device(name: str, key: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{key.rpartition('.')[0]}.device: {name} cannot be used here: {reason}") from error
    return device


def _loaded(path: str, key: str, device: torch.device) -> tuple[Any, Any]:
    transformers_logging.disable_progress_bar()
    dtype = "auto" if device.type == "cuda" else torch.float32  # CPUs are slow in any other
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model, loading = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{key}: cannot load {path}: {reason}; expected a folder or hub name of a sequence classification model"
        ) from error
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ModelError(
            f"{key}: {path} has no weights for {missing}, which would be random; expected a trained reward model"
        )
    if model.config.num_labels != 1:
        raise ModelError(
            f"{key}: expected a model with one label, whose logit is the reward, got {model.config.num_labels} labels "
            f"in {path}; to make one number of them, write a reward function"
        )
    model.eval()
    model.to(device)
    return model, tokenizer


def _pad_id(model: Any, tokenizer: Any, key: str) -> int:
    for token_id in (model.config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ModelError(f"{key}: the tokenizer has neither a pad token nor an end-of-sequence token to pad with")


def _most(model: Any, tokenizer: Any) -> int:
    """The longest text, in tokens. A tokenizer that knows of no limit has a huge one."""
    positions = model.config.to_dict().get("max_position_embeddings")
    return min(int(tokenizer.model_max_length), int(positions or tokenizer.model_max_length))
