"""The engine's thread: takes requests, aborts and weights between decode steps, and gives completions.

    between two steps: swap staged weights ─► aborts ─► waiting requests into rows ─► a chunk of their prompts
                       ─► room for the next tokens ─► one step of each batch

Two batches: the running policy's, and for pinned requests (evaluation) one with a private copy of the weights it began
with. Both make a step in turn, so neither waits for the other, and both have their rows in one arena, so that an
evaluation takes no more memory for keys and values; what it needs beside is its copy of the weights. Callers wait for
nothing but their futures.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from areal_rloo.config.engines import EmbeddedConfig
from areal_rloo.engines.base import EngineStatistics, GenerationRequest
from areal_rloo.engines.embedded.batch import DecodeBatch
from areal_rloo.engines.embedded.cache import Cache, RowKind
from areal_rloo.engines.embedded.parameters import Parameters, load_checkpoint
from areal_rloo.engines.embedded.running import Running
from areal_rloo.engines.embedded.scheduler import Admitted, Ended, Scheduler
from areal_rloo.engines.embedded.transformer import signed
from areal_rloo.errors import EngineError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Completion

logger = get_logger(__name__)

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
        options: EmbeddedConfig | None = None,
        steps_ahead: int | None = None,
    ) -> None:
        """
        Args:
            model_path: a Hugging Face folder.
            device: where to compute.
            dtype: of the matrices and of the cache; everything else is float32.
            num_slots: completions decoded together.
            context_tokens: longest prompt and completion together.
            policy_version: of the weights in the folder.
            options: `rollout.embedded`.
            steps_ahead: steps launched before the host looks at the tokens of the last; None: 1 on a GPU, where the
                launch overlaps the computation, and 0 on a CPU, where there is nothing to overlap.
        """
        options = options or EmbeddedConfig()
        parameters, cos, sin = load_checkpoint(model_path, context_tokens=context_tokens, device=device, dtype=dtype)
        self._rope = torch.stack([cos, signed(sin)])
        self._context_tokens = context_tokens
        self._num_slots = num_slots
        self._steps_ahead = (1 if device.type == "cuda" else 0) if steps_ahead is None else steps_ahead
        self._policy_version = policy_version
        num_tokens = options.cache_tokens or max(context_tokens, num_slots * context_tokens // 2)
        self._cache = Cache(
            parameters.architecture,
            num_tokens=num_tokens,
            context_tokens=min(context_tokens, num_tokens),
            device=device,
            dtype=dtype,
        )
        self._scheduler = Scheduler(self._cache, self._rope, prefill_chunk_tokens=options.prefill_chunk_tokens)
        self._running = self._admitted(parameters, RowKind.RUNNING)
        self._waiting: dict[RowKind, deque[Running]] = {RowKind.RUNNING: deque(), RowKind.PINNED: deque()}
        self._staged: deque[_Staged] = deque()
        self._aborts: set[str] = set()
        self._live: set[str] = set()
        self._num_submitted = 0
        self._counts = dict.fromkeys(("finished", "steps", "updates"), 0)
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
                seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
                kind = RowKind.PINNED if request.pinned else RowKind.RUNNING
                self._waiting[kind].append(Running(request, future, seed, self._num_submitted))
                self._num_submitted += 1
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
                num_running=self._scheduler.num_admitted,
                num_waiting=sum(len(waiting) for waiting in self._waiting.values()),
                num_finished=self._counts["finished"],
                num_preempted=self._scheduler.num_preempted,
                generated_tokens=self._scheduler.generated_tokens,
                prefill_tokens=self._scheduler.prefill_tokens,
                cached_tokens=self._scheduler.cached_tokens,
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
            if needed > self._cache.capacities[-1]:
                raise EngineError(
                    f"request {name}: needs {needed} tokens, the cache holds {self._cache.capacities[-1]}; "
                    "raise rollout.embedded.cache_tokens"
                )
            if name in self._live or name in seen:
                raise EngineError(f"request {name}: this id is in use")
            seen.add(name)

    def _admitted(self, parameters: Parameters, kind: RowKind) -> Admitted:
        batch = DecodeBatch(
            parameters,
            self._cache,
            self._rope,
            kind=kind,
            num_slots=self._num_slots,
            context_tokens=self._context_tokens,
            steps_ahead=self._steps_ahead,
        )
        admitted = Admitted(batch, self._policy_version, num_slots=self._num_slots)
        self._scheduler.batches[kind] = admitted
        return admitted

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
            self._admit_waiting()
            now_s = time.monotonic()
            idle = self._scheduler.num_admitted == 0
            if self._idle_since_s is not None and not idle:
                self._idle_s += now_s - self._idle_since_s
                self._idle_since_s = None
            elif self._idle_since_s is None and idle:
                self._idle_since_s = now_s
        for admitted in list(self._scheduler.batches.values()):
            self._scheduler.prefill(admitted)
        self._make_room()
        for admitted in list(self._scheduler.batches.values()):
            if admitted.batch.running:
                self._count(self._scheduler.step(admitted), num_steps=1)
        return True

    def _has_work(self) -> bool:
        if self._closing or self._staged or self._aborts or self._scheduler.num_admitted:
            return True
        self._note_idle()
        return any(
            running.request.min_version <= self._policy_version
            for waiting in self._waiting.values()
            for running in waiting
        )

    def _note_idle(self) -> None:
        if self._idle_since_s is None:
            self._idle_since_s = time.monotonic()

    def _make_room(self) -> None:
        ended, preempted = self._scheduler.make_room()
        if not ended and not preempted:
            return
        self._count(ended)
        with self._changed:
            for running in preempted:  # the latest first, so that the earliest is in front in the end
                self._waiting[RowKind.PINNED if running.request.pinned else RowKind.RUNNING].appendleft(running)

    def _count(self, ended: Ended, num_steps: int = 0) -> None:
        """Give completions to those who wait for them."""
        with self._changed:
            self._counts["steps"] += num_steps
            self._counts["finished"] += sum(reason != "abort" for _, reason in ended)
            self._live -= {running.request.request_id for running, _ in ended}
        for running, reason in ended:
            running.future.set_result(running.completion(reason))

    def _swap_staged(self) -> None:
        while self._staged:
            policy_version, weights, future = self._staged.popleft()
            started_s = time.perf_counter()
            if policy_version > self._policy_version:
                try:
                    self._running.batch.parameters.copy_from(weights)
                except EngineError as error:
                    future.set_exception(error)
                    continue
                self._policy_version = policy_version
                self._scheduler.new_version(policy_version)
                self._counts["updates"] += 1
            self._swap_s += time.perf_counter() - started_s
            future.set_result(self._policy_version)

    def _end_aborted(self) -> None:
        if not self._aborts:
            return
        ended = self._scheduler.abort(self._aborts)
        for waiting in self._waiting.values():
            for running in [r for r in waiting if r.request.request_id in self._aborts]:
                waiting.remove(running)
                ended.append((running, "abort"))
        self._aborts = set()
        self._count(ended)

    def _admit_waiting(self) -> None:
        self._scheduler.admit(self._running, self._waiting[RowKind.RUNNING])
        pinned = self._scheduler.batches.get(RowKind.PINNED)
        if pinned is not None and pinned.num == 0 and pinned.policy_version != self._policy_version:
            del self._scheduler.batches[RowKind.PINNED]
            self._scheduler.forget_unused_versions()
            pinned = None
        if not self._waiting[RowKind.PINNED]:
            return
        if pinned is None:
            pinned = self._admitted(self._running.batch.parameters.clone(), RowKind.PINNED)
        # A request for weights newer than the pinned ones waits until the batch is empty and its copy is renewed.
        self._scheduler.admit(pinned, self._waiting[RowKind.PINNED])

    def _end_all(self) -> None:
        self._aborts = set(self._live)
        self._end_aborted()
        for _, _, future in self._staged:
            future.set_exception(EngineError("the engine was closed"))
        self._death = EngineError("the engine was closed")

    def _die(self, error: EngineError) -> None:
        with self._changed:
            self._death = error
            futures = [running.future for waiting in self._waiting.values() for running in waiting]
            futures += [running.future for a in self._scheduler.batches.values() for running in a.all()]
            for _, _, staged in self._staged:
                staged.set_exception(error)
        for future in futures:
            if not future.done():
                future.set_exception(error)
