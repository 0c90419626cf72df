"""The engine's thread: take requests, aborts and weights between decode steps, and return completions.

    swap staged weights ─► end aborted requests ─► place waiting requests in rows ─► prefill a chunk
        ─► make room for the next tokens ─► one decode step of each batch ─► again

There are two batches: the running policy's, and a batch for pinned requests (evaluation) with a private copy of the
weights. Both decode in turn, so neither waits for the other. Both share one cache, so an evaluation needs extra memory
for the copy of the weights only. Callers wait only for their futures: no lock is held while weights are copied or
tokens are computed.

If learner and engine compute in turns (`turns.py`), the engine preempts all requests and frees the cache before it
gives the turn. Meanwhile the thread does all that needs no cache: weights, aborts, questions for the tokens so far.
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

from areal_rloo.config import EmbeddedConfig, LoraConfig
from areal_rloo.engines.base import EngineStatistics, GenerationRequest, WorkClock, check_request, uncancellable_future
from areal_rloo.engines.embedded.batch import DecodeBatch
from areal_rloo.engines.embedded.cache import Cache, RowKind, tokens_for
from areal_rloo.engines.embedded.parameters import Parameters, load_checkpoint
from areal_rloo.engines.embedded.requests import Submission, WaitingQueue, WaitingRequest
from areal_rloo.engines.embedded.scheduler import Ended, Scheduler
from areal_rloo.errors import EngineError, GenerationError, UserError
from areal_rloo.models.device import avoid_plans_of_shapes
from areal_rloo.telemetry import trace
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Completion
from areal_rloo.turns import LOOK_EVERY_S, EngineTurn

logger = get_logger(__name__)

_Staged = tuple[int, Iterable[tuple[str, Tensor]], Future[int]]


class EmbeddedEngine:
    """Implements `areal_rloo.engines.base.Engine`, which documents the methods."""

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
        lora: LoraConfig | None = None,
        steps_ahead: int | None = None,
        turn: EngineTurn | None = None,
    ) -> None:
        """Load the weights of `policy_version` from a Hugging Face folder.

        Matrices and cache have the dtype; everything else is float32. `lora`: new weights are these adapters
        alone. `steps_ahead` steps are launched before the host reads the tokens of the last step. None: 1 on a GPU,
        where the launch overlaps the computation; 0 on a CPU. `turn`: compute in turns with the learner; the engine
        closes the turn.
        """
        options = options or EmbeddedConfig()
        avoid_plans_of_shapes(device)
        self._steps_ahead = (1 if device.type == "cuda" else 0) if steps_ahead is None else steps_ahead
        table_tokens = context_tokens + self._steps_ahead  # an ended row is decoded a few steps more
        parameters, self._rope = load_checkpoint(
            model_path, context_tokens=table_tokens, device=device, dtype=dtype, lora=lora
        )
        architecture = parameters.architecture
        self._vocab_size = architecture.vocab_size
        self._context_tokens = context_tokens
        self._num_slots = num_slots
        self._policy_version = policy_version
        wanted = options.cache_tokens or tokens_for(num_slots, context_tokens, architecture, device=device, dtype=dtype)
        fitting = min(context_tokens, wanted)
        self._turn = turn
        self._cache = Cache(
            architecture,
            num_tokens=wanted,
            context_tokens=fitting,
            device=device,
            dtype=dtype,
            has_memory=turn is None,
        )
        self._scheduler = Scheduler(self._cache, self._rope, prefill_chunk_tokens=options.prefill_chunk_tokens)
        self._running = self._make_batch(parameters, RowKind.RUNNING)
        self._waiting = WaitingQueue()
        self._staged: deque[_Staged] = deque()
        self._aborts: set[Submission] = set()
        self._asked: list[Future[dict[str, Completion]]] = []  # for the tokens so far
        self._live: dict[str, Submission] = {}
        self._num_submitted = 0
        self._counts = dict.fromkeys(("finished", "steps", "updates"), 0)
        self._clock = WorkClock()
        self._swap_s = 0.0
        self._closing = False
        self._death: EngineError | UserError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        with self._changed:
            if self._death is not None:
                raise self._death
            futures = [self._queued(request) for request in requests]
            self._changed.notify()
        return futures

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._changed:
            self._aborts |= {self._live[name] for name in request_ids if name in self._live}
            self._changed.notify()

    def unfinished(self) -> Future[dict[str, Completion]]:
        future: Future[dict[str, Completion]] = Future()
        with self._changed:
            if self._death is not None:
                raise self._death
            self._asked.append(future)
            self._changed.notify()
        return future

    def load_weights(self, policy_version: int, weights: Iterable[tuple[str, Tensor]]) -> Future[int]:
        future: Future[int] = uncancellable_future()
        with self._changed:
            if self._death is not None:
                raise self._death
            self._staged.append((policy_version, weights, future))
            self._changed.notify()
        return future

    def statistics(self) -> EngineStatistics:
        with self._changed:
            return EngineStatistics(
                policy_version=self._policy_version,
                num_running=len(self._live) - len(self._waiting),
                num_waiting=len(self._waiting),
                num_finished=self._counts["finished"],
                num_preempted=self._scheduler.num_preempted,
                generated_tokens=self._scheduler.generated_tokens,
                prefill_tokens=self._scheduler.prefill_tokens,
                cached_tokens=self._scheduler.cached_tokens,
                decode_steps=self._counts["steps"],
                weight_updates=self._counts["updates"],
                **self._clock.times()._asdict(),
                swap_s=self._swap_s,
                turns_given=0 if self._turn is None else self._turn.num_given,
                turn_wait_s=0.0 if self._turn is None else self._turn.waited_s,
            )

    def close(self) -> None:
        """End the thread; unfinished requests get the tokens made so far."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _queued(self, request: GenerationRequest) -> Future[Completion]:
        """Queue a request if it can be served; return the future."""
        future: Future[Completion] = uncancellable_future()
        try:
            self._check(request)
        except GenerationError as error:
            future.set_exception(error)
            return future
        seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        submission = Submission(request, future, seed, self._num_submitted)
        self._waiting.add(WaitingRequest.of(submission))
        self._live[request.request_id] = submission
        self._num_submitted += 1
        return future

    def _check(self, request: GenerationRequest) -> None:
        check_request(request, in_use=self._live, vocab_size=self._vocab_size, context_tokens=self._context_tokens)
        needed, held = len(request.prompt_tokens) + request.sampling.max_new_tokens, self._cache.capacities[-1]
        if needed > held:
            raise GenerationError(
                f"request {request.request_id}: needs {needed} tokens, the cache holds {held}; raise "
                "rollout.embedded.cache_tokens"
            )

    def _make_batch(self, parameters: Parameters, kind: RowKind) -> DecodeBatch:
        batch = self._scheduler.batches[kind] = DecodeBatch(
            parameters,
            self._cache,
            self._rope,
            policy_version=self._policy_version,
            kind=kind,
            num_slots=self._num_slots,
            context_tokens=self._context_tokens,
            steps_ahead=self._steps_ahead,
        )
        return batch

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._work():
                    pass
        except UserError as error:
            self._die(error)
        except BaseException as error:
            logger.exception("the engine stopped")
            self._die(EngineError(f"the engine stopped: {type(error).__name__}: {error}"))
        finally:
            if self._turn is not None:
                self._turn.close()

    def _work(self) -> bool:
        """Do all work between two steps, then a step; return False at the end."""
        with self._changed:
            self._changed.wait_for(self._has_work, None if self._turn is None else LOOK_EVERY_S)
            closing = self._closing
        if closing:
            self._end_all()
            return False
        self._swap_staged()
        self._end_aborted()
        self._tell_unfinished()
        if self._turn is not None and not self._may_compute(self._turn):
            return True
        self._renew_pinned()
        with self._changed:
            self._scheduler.admit(self._waiting, self._policy_version)
            self._clock.note(self._scheduler.num_placed)
        began_s, num_placed = time.monotonic(), self._scheduler.num_placed
        for batch in list(self._scheduler.batches.values()):
            self._scheduler.prefill(batch)
        self._give_and_requeue(*self._scheduler.make_room())
        for batch in list(self._scheduler.batches.values()):
            if batch.running:
                self._give(self._scheduler.step(batch), num_steps=1)
        if num_placed:
            trace.record("engine", "decode", began_s, completions=num_placed)
        return True

    def _may_compute(self, turn: EngineTurn) -> bool:
        """Give the turn to a learner that wants it, or take the turn for requests; return True with the turn."""
        if turn.held and turn.is_wanted():
            self._give_and_requeue(*self._scheduler.release_memory())
            turn.give()
        elif not turn.held:
            with self._changed:
                can_start = self._waiting.any_for(self._policy_version)
            self._clock.note(int(can_start))
            if can_start and turn.take():
                self._cache.allocate()
        return turn.held

    def _has_work(self) -> bool:
        if self._closing or self._staged or self._aborts or self._asked or self._scheduler.num_placed:
            return True
        if self._turn is not None and not self._turn.held:
            return False  # `_may_compute` looks for the turn, after a timeout
        self._clock.note(0)
        return self._waiting.any_for(self._policy_version)

    def _give(self, ended: Ended, num_steps: int = 0) -> None:
        with self._changed:
            self._counts["steps"] += num_steps
            self._counts["finished"] += sum(completion.finish_reason != "abort" for _, completion in ended)
            for submission, _ in ended:
                del self._live[submission.request.request_id]
        for submission, completion in ended:
            submission.future.set_result(completion)

    def _give_and_requeue(self, ended: Ended, preempted: Iterable[WaitingRequest]) -> None:
        self._give(ended)
        with self._changed:
            for waiting in preempted:
                self._waiting.add(waiting)

    def _swap_staged(self) -> None:
        while self._staged:  # only this thread removes an update, after handling it
            policy_version, weights, future = self._staged[0]
            started_s = time.monotonic()
            taken = policy_version > self._policy_version
            error = self._take_weights(weights) if taken else None
            trace.record("engine", f"swap to version {policy_version}", started_s)
            with self._changed:
                if taken and error is None:
                    self._policy_version = policy_version
                    self._scheduler.new_version(policy_version)
                    self._counts["updates"] += 1
                self._staged.popleft()
                self._swap_s += time.monotonic() - started_s
            if error is None:
                future.set_result(self._policy_version)
            else:
                future.set_exception(error)

    def _take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> EngineError | None:
        """Check and copy weights. Return the error if the check fails; an error while copying ends the engine."""
        parameters = self._running.parameters
        try:
            fitting = parameters.fitting(weights)
        except EngineError as error:
            return error
        except Exception as error:  # raised by the caller's iterable
            logger.exception("weights could not be read")
            return EngineError(f"weights could not be read: {type(error).__name__}: {error}")
        parameters.copy_from(fitting)
        return None

    def _end_aborted(self) -> None:
        with self._changed:
            aborts, self._aborts = self._aborts, set()
            if not aborts:
                return
            waiting = self._waiting.take(aborts)
        self._give([*self._scheduler.abort(aborts), *((one.submission, one.completion("abort")) for one in waiting)])

    def _tell_unfinished(self) -> None:
        if not self._asked:
            return
        ended, placed = self._scheduler.so_far()
        self._give(ended)
        with self._changed:
            found = [*placed, *self._waiting]
            asked, self._asked = self._asked, []
        begun = {one.submission.request.request_id: one.completion("abort") for one in found if len(one.tokens)}
        for future in asked:
            if future.set_running_or_notify_cancel():
                future.set_result(begun)

    def _renew_pinned(self) -> None:
        """Remove the pinned batch when it is empty and outdated; make a batch when a pinned request waits."""
        batches, newest = self._scheduler.batches, self._policy_version
        pinned = batches.get(RowKind.PINNED)
        with self._changed:
            outdated = pinned is not None and pinned.num_requests == 0 and pinned.policy_version != newest
            outdated = outdated and not self._waiting.holds_weights
            wanted = pinned is None or outdated
            wanted = wanted and self._waiting.first(RowKind.PINNED, newest, newest) is not None
        if outdated:
            del batches[RowKind.PINNED], pinned  # the old weights go before the new copy comes
            self._scheduler.forget_unused_versions()
        if wanted:
            self._make_batch(self._running.parameters.clone(), RowKind.PINNED)

    def _end_all(self) -> None:
        with self._changed:
            self._death = error = EngineError("the engine was closed")
            self._aborts = set(self._live.values())
        self._tell_unfinished()
        self._end_aborted()
        for _, _, update in self._staged:
            update.set_exception(error)

    def _die(self, error: EngineError | UserError) -> None:
        with self._changed:
            self._death = error
            unfinished, self._live = self._live, {}
        for submission in unfinished.values():
            submission.future.set_exception(error)
        for asked in self._asked:
            if asked.set_running_or_notify_cancel():
                asked.set_exception(error)
        for _, _, update in self._staged:
            update.set_exception(error)
