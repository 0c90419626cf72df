"""A reward model: a sequence classification model with one label, whose logit is the reward.

    score(request) ─► all waiting texts, shortest first, in batches ─► one forward pass a batch ─► a logit for each text

The forward passes run on one thread. A batch does not change a reward: texts are padded on the right, and attention
ignores the padding. The text is the model's chat template over the prompt's messages and the completion (the policy's
last turn) as the assistant's message. If the tokenizer has no template, the text is the prompt followed by the
completion. A text longer than the model's context has no reward: a cut text would get the reward of another text.

A batch has a deadline. A thread cannot be killed, so if a batch hangs, every waiting completion misses the deadline.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from areal_rloo.errors import ModelError, RewardError, described
from areal_rloo.models.files import snapshot
from areal_rloo.models.folder import check_weights
from areal_rloo.rewards.request import RewardRequest, WorkStatistics, Worth, read_worth

_JOIN_S = 5.0  # for a running batch to end


_Pending = tuple[RewardRequest, "Future[float]"]
"""A completion without a reward yet, and the future of the reward."""


class RewardModel:
    """One model on one device, with one thread. Use it on one event loop."""

    def __init__(self, path: str, *, key: str, device: str, batch_size: int, deadline_s: float) -> None:
        """Load the model at `path`, a folder or a hub name, for forward passes of `batch_size` completions.

        A batch that takes longer than `deadline_s` gives no rewards.

        `key` is the config key of the path, for errors. `device` is auto (CUDA if there is a device), cpu or cuda:1.

        Raises:
            ModelError: the model cannot be loaded, or is no reward model.
        """
        self._model, self._tokenizer = _loaded(path, key, _device(device, key))
        self._pad_id = _pad_id(self._model, self._tokenizer, key)
        positions = self._model.config.to_dict().get("max_position_embeddings")
        most = int(self._tokenizer.model_max_length)  # huge if the tokenizer has no limit
        self._context_tokens = min(most, int(positions or most))
        self._model.config.pad_token_id = self._pad_id  # a decoder model reads the last token that is no padding
        self._batch_size, self._deadline_s = batch_size, deadline_s
        self._key, self._busy_s = key, 0.0
        self._num_callers = self._num_running = 0  # callers of `score`; texts of the running batch
        self._began_s: float | None = None  # of the running batch
        self._waiting: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._run, name="reward-model", daemon=True)
        self._thread.start()

    async def score(self, request: RewardRequest) -> Worth:
        """Compute the logit of a completion.

        Raises:
            RewardError: the text is longer than the model's context, the forward pass failed or took too long, or the
                logit is not finite.
        """
        reward: Future[float] = Future()
        self._waiting.put((request, reward))
        made = asyncio.wrap_future(reward)
        self._num_callers += 1
        try:
            while not made.done():
                began_s = self._began_s
                left_s = self._deadline_s - (0 if began_s is None else time.monotonic() - began_s)
                if left_s <= 0:
                    detail = f"the reward model has computed a batch for more than {self._deadline_s:g} s"
                    raise RewardError("reward_timeout", detail)
                await asyncio.wait([made], timeout=left_s)
            return read_worth(made.result(), request, returns="trajectory")
        finally:
            self._num_callers -= 1
            made.cancel()

    def statistics(self) -> WorkStatistics:
        num_queued = max(0, self._num_callers - self._num_running)
        return WorkStatistics(
            runner=self._key, num_at_once=self._batch_size, num_queued=num_queued, busy_s=self._busy_s
        )

    async def close(self) -> None:
        """End the thread after the running batch. A forward pass that hangs ends with the process."""
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join, _JOIN_S)

    def _ids(self, request: RewardRequest) -> list[int]:
        if self._tokenizer.chat_template is None:
            ids = self._tokenizer(request.item.text + request.completion, verbose=False)["input_ids"]
        else:
            messages = [*request.item.plain_messages, {"role": "assistant", "content": request.completion}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > self._context_tokens:
            raise RewardError(
                "reward_error",
                f"prompt and completion have {len(ids)} tokens, but the reward model's context has "
                f"{self._context_tokens}; lower data.max_prompt_tokens or rollout.sampling.max_new_tokens, or use a "
                "model with a longer context",
            )
        return list(ids)

    def _run(self) -> None:
        """Score all waiting texts, again and again; shortest first, so that little is padded. Runs on the thread."""
        while (first := self._waiting.get()) is not None:
            taken = [first]
            while not self._waiting.empty():
                if (following := self._waiting.get()) is None:
                    self._waiting.put(None)  # the end, after this batch
                    break
                taken.append(following)
            taken = [pending for pending in taken if pending[1].set_running_or_notify_cancel()]
            self._began_s = time.monotonic()
            try:
                self._score_all(taken)
            except BaseException as error:  # noqa: BLE001 - a model's code may raise anything; no wait may be forgotten
                for _, reward in taken:
                    if not reward.done():
                        reward.set_exception(RewardError("reward_error", described(error)))
            self._began_s = None

    def _score_all(self, taken: Sequence[_Pending]) -> None:
        texts = [(ids, pending[1]) for pending in taken if (ids := self._ids_or_none(*pending)) is not None]
        texts.sort(key=lambda text: len(text[0]))
        for start in range(0, len(texts), self._batch_size):
            self._score(texts[start : start + self._batch_size])

    def _ids_or_none(self, request: RewardRequest, reward: Future[float]) -> list[int] | None:
        """Return the token ids of a text; None if the text cannot be scored."""
        try:
            return self._ids(request)
        except Exception as error:  # noqa: BLE001 - a chat template may raise anything; drop only this sample
            failure = error if isinstance(error, RewardError) else RewardError("reward_error", described(error))
            reward.set_exception(failure)
        return None

    def _score(self, batch: Sequence[tuple[list[int], Future[float]]]) -> None:
        started_s = self._began_s = time.monotonic()
        self._num_running = len(batch)
        try:
            try:
                logits = self._logits([ids for ids, _ in batch])
            finally:
                self._began_s, self._num_running = None, 0
                self._busy_s += len(batch) * (time.monotonic() - started_s)
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything; drop only this sample
            if len(batch) > 1:  # one bad text, or too many for the memory: score each alone
                for text in batch:
                    self._score([text])
            else:
                batch[0][1].set_exception(RewardError("reward_error", described(error)))
        else:
            for (_, reward), logit in zip(batch, logits, strict=True):
                reward.set_result(logit)

    def _logits(self, texts: Sequence[list[int]]) -> list[float]:
        longest = max(map(len, texts))
        ids = torch.tensor([text + [self._pad_id] * (longest - len(text)) for text in texts])
        lengths = torch.tensor([len(text) for text in texts])
        mask = torch.arange(longest) < lengths[:, None]
        device = self._model.device
        with torch.inference_mode():
            logits = self._model(input_ids=ids.to(device), attention_mask=mask.long().to(device)).logits
        return [float(logit) for logit in logits[:, 0].float().tolist()]


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
    dtype = "auto" if device.type == "cuda" else torch.float32  # on CPUs other dtypes are slow
    try:
        folder = snapshot(path)
        check_weights(key, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, use_safetensors=True, trust_remote_code=False
        )
    except ModelError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{key}: cannot load {path}: {reason}; expected a folder or hub name of a sequence classification model"
        ) from error
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ModelError(
            f"{key}: {path} has no weights for {missing}; random weights would be used; expected a trained reward model"
        )
    if model.config.num_labels != 1:
        raise ModelError(
            f"{key}: expected a model with one label, whose logit is the reward, got {model.config.num_labels} labels "
            f"in {path}; to combine several labels, write a reward function"
        )
    model.eval()
    model.to(device)
    return model, tokenizer


def _pad_id(model: Any, tokenizer: Any, key: str) -> int:
    for token_id in (model.config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ModelError(f"{key}: the tokenizer has neither a pad token nor an end-of-sequence token to pad with")
