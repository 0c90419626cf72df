"""The engine's thread: takes requests, aborts and weights between decode steps, and gives completions.

    between two steps: swap staged weights ─► aborts ─► waiting requests into free rows ─► one step of each batch

Two batches: the running policy's, and for pinned requests (evaluation) one with a private copy of the weights it began
with. Both make a step in turn, so neither waits for the other. Callers wait for nothing but their futures.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal_rloo.engines.base import EngineStatistics, GenerationRequest
from areal_rloo.engines.embedded.batch import DecodeBatch, Running
from areal_rloo.engines.embedded.parameters import load_checkpoint
from areal_rloo.engines.embedded.transformer import signed
from areal_rloo.errors import EngineError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Completion

logger = get_logger(__name__)

_Waiting = tuple[GenerationRequest, Future[Completion]]
_Staged = tuple[int, Iterable[tuple[str, Tensor]], Future[int]]


class EmbeddedEngine:
    """Implements `areal_rloo.engines.base.Engine`; see there for what each method promises."""

    def __init__(
        self,
        model_path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        num_slots: int,
        context_tokens: int,
        policy_version: int = 0,
    ) -> None:
        parameters, cos, sin = load_checkpoint(model_path, context_tokens=context_tokens, device=device, dtype=dtype)
        self._rope = torch.stack([cos, signed(sin)]).to(dtype)
        self._context_tokens = context_tokens
        self._policy_version = policy_version
        self._batch = DecodeBatch(parameters, self._rope, num_rows=num_slots, context_tokens=context_tokens)
        self._pinned: DecodeBatch | None = None
        self._pinned_version = policy_version
        self._waiting: deque[_Waiting] = deque()
        self._waiting_pinned: deque[_Waiting] = deque()
        self._staged: deque[_Staged] = deque()
        self._aborts: set[str] = set()
        self._live: set[str] = set()
        self._counts = dict.fromkeys(("finished", "generated", "prefill", "steps", "updates"), 0)
        self._idle_s = 0.0
        self._idle_since_s: float | None = time.monotonic()
        self._swap_s = 0.0
        self._closing = False
        self._death: EngineError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        futures: list[Future[Completion]] = [Future() for _ in requests]
        with self._changed:
            if self._death is not None:
                raise self._death
            self._check(requests)
            for request, future in zip(requests, futures, strict=True):
                self._live.add(request.request_id)
                (self._waiting_pinned if request.pinned else self._waiting).append((request, future))
            self._changed.notify()
        return futures

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._changed:
            self._aborts |= set(request_ids) & self._live
            self._changed.notify()

    def load_weights(self, policy_version: int, weights: Iterable[tuple[str, Tensor]]) -> Future[int]:
        future: Future[int] = Future()
        with self._changed:
            if self._death is not None:
                raise self._death
            self._staged.append((policy_version, weights, future))
            self._changed.notify()
        return future

    def statistics(self) -> EngineStatistics:
        with self._changed:
            idle_s = self._idle_s
            if self._idle_since_s is not None:
                idle_s += time.monotonic() - self._idle_since_s
            return EngineStatistics(
                policy_version=self._policy_version,
                num_running=self._num_running(),
                num_waiting=len(self._waiting) + len(self._waiting_pinned),
                num_finished=self._counts["finished"],
                generated_tokens=self._counts["generated"],
                prefill_tokens=self._counts["prefill"] + self._batch.prefill_tokens,
                decode_steps=self._counts["steps"],
                weight_updates=self._counts["updates"],
                idle_s=idle_s,
                swap_s=self._swap_s,
            )

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _check(self, requests: Sequence[GenerationRequest]) -> None:
        seen: set[str] = set()
        for request in requests:
            name, num = request.request_id, len(request.prompt_tokens)
            needed = num + request.sampling.max_new_tokens
            if num == 0:
                raise EngineError(f"request {name}: the prompt has no token")
            if needed > self._context_tokens:
                raise EngineError(f"request {name}: needs {needed} tokens, the context holds {self._context_tokens}")
            if name in self._live or name in seen:
                raise EngineError(f"request {name}: this id is in use")
            seen.add(name)

    def _num_running(self) -> int:
        return self._batch.num_running + (self._pinned.num_running if self._pinned is not None else 0)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except Exception as error:
            logger.exception("the engine stopped")
            self._die(EngineError(f"the engine stopped: {type(error).__name__}: {error}"))

    def _turn(self) -> bool:
        """Everything between two steps, then a step; False at the end."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._closing:
                self._end_all()
                return False
            self._swap_staged()
            self._end_aborted()
            self._start_waiting()
            now_s = time.monotonic()
            idle = self._num_running() == 0
            if self._idle_since_s is not None and not idle:
                self._idle_s += now_s - self._idle_since_s
                self._idle_since_s = None
            elif self._idle_since_s is None and idle:
                self._idle_since_s = now_s
        for batch in (self._batch, self._pinned):
            if batch is not None and batch.num_running:
                self._step(batch)
        return True

    def _has_work(self) -> bool:
        if self._closing or self._staged or self._aborts or self._num_running():
            return True
        self._note_idle()
        startable = any(request.min_version <= self._policy_version for request, _ in self._waiting)
        return startable or any(request.min_version <= self._policy_version for request, _ in self._waiting_pinned)

    def _note_idle(self) -> None:
        if self._idle_since_s is None:
            self._idle_since_s = time.monotonic()

    def _step(self, batch: DecodeBatch) -> None:
        num = batch.num_running
        finished = batch.step()
        with self._changed:
            self._counts["generated"] += num
            self._counts["steps"] += 1
            self._counts["finished"] += len(finished)
            self._live -= {running.request.request_id for running, _ in finished}
        _resolve(finished)

    def _swap_staged(self) -> None:
        while self._staged:
            policy_version, weights, future = self._staged.popleft()
            started_s = time.perf_counter()
            if policy_version > self._policy_version:
                try:
                    self._batch.parameters.copy_from(weights)
                except EngineError as error:
                    future.set_exception(error)
                    continue
                self._policy_version = policy_version
                self._batch.new_version(policy_version)
                self._counts["updates"] += 1
            self._swap_s += time.perf_counter() - started_s
            future.set_result(self._policy_version)

    def _end_aborted(self) -> None:
        if not self._aborts:
            return
        for batch in (self._batch, self._pinned):
            if batch is not None:
                _resolve(batch.abort(self._aborts))
        for queue in (self._waiting, self._waiting_pinned):
            for waiting in [w for w in queue if w[0].request_id in self._aborts]:
                queue.remove(waiting)
                waiting[1].set_result(_nothing())
        self._live -= self._aborts
        self._aborts = set()

    def _start_waiting(self) -> None:
        started = self._taken(self._waiting, self._batch.num_free)
        if started:
            self._batch.start(started, self._policy_version)
        if self._pinned is not None and self._pinned.num_running == 0 and self._pinned_version != self._policy_version:
            self._counts["prefill"] += self._pinned.prefill_tokens
            self._pinned = None
        if not self._waiting_pinned:
            return
        if self._pinned is None:
            self._pinned = DecodeBatch(
                self._batch.parameters.clone(),
                self._rope,
                num_rows=self._batch.num_rows,
                context_tokens=self._context_tokens,
            )
            self._pinned_version = self._policy_version
        # A request for weights newer than the pinned ones waits until the batch is empty and its copy is renewed.
        started = self._taken(self._waiting_pinned, self._pinned.num_free, self._pinned_version)
        if started:
            self._pinned.start(started, self._pinned_version)

    def _taken(self, queue: deque[_Waiting], num: int, policy_version: int | None = None) -> list[_Waiting]:
        """The first requests that may start at this version; those that may not stay in their places."""
        version = self._policy_version if policy_version is None else policy_version
        taken: list[_Waiting] = []
        kept: list[_Waiting] = []
        while queue and len(taken) < num:
            waiting = queue.popleft()
            (taken if waiting[0].min_version <= version else kept).append(waiting)
        queue.extendleft(reversed(kept))
        return taken

    def _end_all(self) -> None:
        self._aborts = set(self._live)
        self._end_aborted()
        for _, _, future in self._staged:
            future.set_exception(EngineError("the engine was closed"))
        self._death = EngineError("the engine was closed")

    def _die(self, error: EngineError) -> None:
        with self._changed:
            self._death = error
            futures: list[Future[Completion]] = [future for _, future in (*self._waiting, *self._waiting_pinned)]
            for batch in (self._batch, self._pinned):
                futures += batch.futures() if batch is not None else []
            for _, _, staged in self._staged:
                staged.set_exception(error)
        for future in futures:
            if not future.done():
                future.set_exception(error)


def _resolve(finished: Sequence[tuple[Running, Completion]]) -> None:
    for running, completion in finished:
        running.future.set_result(completion)


def _nothing() -> Completion:
    empty = np.zeros(0, dtype=np.int32)
    return Completion(empty, np.zeros(0, dtype=np.float32), empty, "abort")
