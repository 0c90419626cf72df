"""The embedded engine under bad requests, bad weights, late aborts, a crash and a close."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.model_versions import model_of
from support.requests_to_serve import PROMPT, request, results, serving, wait_until

from areal_rloo.engines.base import GenerationRequest
from areal_rloo.engines.embedded.batch import DecodeBatch
from areal_rloo.engines.embedded.cache import Cache
from areal_rloo.engines.embedded.parameters import Parameters
from areal_rloo.engines.embedded.scheduler import Ended, Scheduler
from areal_rloo.errors import EngineError, GenerationError

REFUSED = {
    "needs 155 tokens, the context holds 128": request("bad", max_new_tokens=150),
    "the prompt has no token": request("bad", prompt=()),
    "expected max_new_tokens of at least 1, got 0": request("bad", max_new_tokens=0),
    "expected a temperature above 0, got 0": request("bad", temperature=0),
    "a prompt: expected token ids from 0 to 257, got 258": request("bad", prompt=(5, 258, 3)),
    "a prompt: expected token ids from 0 to 257, got -1": request("bad", prompt=(5, -1, 300)),
    "a prompt: expected token ids from 0 to 257, got None": request("bad", prompt=(5, None)),
    "a prompt: expected token ids from 0 to 257, got '7'": request("bad", prompt=("7",)),
    "stop_token_ids: expected token ids from 0 to 257, got 100000": request("bad", stop_token_ids=(2, 100000)),
    "stop_token_ids: expected token ids from 0 to 257, got -7": request("bad", stop_token_ids=(-7,)),
}


@pytest.mark.parametrize("complaint", REFUSED)
def test_a_bad_request_is_refused_by_name_and_others_continue(complaint: str, tiny_folders: dict[str, Path]) -> None:
    with serving(tiny_folders["qwen2"]) as engine:
        running = engine.submit([request("good", max_new_tokens=60)])
        beside, bad = engine.submit([request("beside"), REFUSED[complaint]])
        with pytest.raises(GenerationError, match=f"request bad: {complaint}"):
            bad.result(timeout=0)
        (completion, _) = results([*running, beside])
        results(engine.submit([request("beside"), request("bad")]))
    assert len(completion.tokens) == 60


def test_a_request_id_in_use_is_refused(tiny_folders: dict[str, Path]) -> None:
    with serving(tiny_folders["qwen2"]) as engine:
        first, second = engine.submit([request("a"), request("a")])
        with pytest.raises(GenerationError, match="request a: this id is in use"):
            second.result(timeout=0)
        results([first])


def test_a_failed_engine_fails_all_requests_and_updates(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with serving(tiny_folders["qwen2"], num_slots=1) as engine:
        futures = engine.submit([request("running", max_new_tokens=100), request("waiting", min_version=3)])
        monkeypatch.setattr(Cache, "add", fail)
        futures += engine.submit([request("admitted", prompt=(3,)), request("pinned", pinned=True)])
        for future in futures:
            with pytest.raises(EngineError, match="RuntimeError: out of memory"):
                future.result(timeout=60)
        with pytest.raises(EngineError, match="out of memory"):
            engine.load_weights(1, {}.items())
        with pytest.raises(EngineError, match="out of memory"):
            engine.submit([request("later")])


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_on_the_thread_of_the_engine_fails_all_requests(
    tiny_folders: dict[str, Path], error: BaseException
) -> None:
    def exits() -> Iterator[tuple[str, torch.Tensor]]:
        raise error
        yield

    with serving(tiny_folders["qwen2"]) as engine:
        loaded = engine.load_weights(1, exits())
        with pytest.raises(EngineError, match=f"the engine stopped: {type(error).__name__}"):
            loaded.result(timeout=30)


def test_unreadable_weights_change_nothing(tiny_folders: dict[str, Path]) -> None:
    weights = dict(model_of(tiny_folders["qwen2"], factor=2).named_parameters())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights.items())[:1]
        raise OSError("the file is gone")

    with serving(tiny_folders["qwen2"]) as engine:
        (before,) = results(engine.submit([request("before")]))
        with pytest.raises(EngineError, match="OSError: the file is gone"):
            engine.load_weights(1, broken()).result(timeout=60)
        (after,) = results(engine.submit([request("after")]))
    assert after.behaviour_logprobs.tobytes() == before.behaviour_logprobs.tobytes()


def test_a_failure_while_copying_weights_ends_the_engine(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    weights = dict(model_of(tiny_folders["qwen2"]).named_parameters())
    with serving(tiny_folders["qwen2"], context_tokens=1024) as engine:
        (running,) = engine.submit([request("a", max_new_tokens=1000)])
        monkeypatch.setattr(Parameters, "copy_from", fail)
        updates = [engine.load_weights(version, weights.items()) for version in (1, 2)]
        for future in (*updates, running):
            with pytest.raises(EngineError, match="the device is lost"):
                future.result(timeout=60)


def test_copying_weights_blocks_no_caller(tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Parameters.copy_from
    copying: list[int] = []
    submitted = []

    def slow(self: Parameters, fitting: dict[str, torch.Tensor]) -> None:
        copying.append(1)
        wait_until(lambda: bool(submitted))
        copied(self, fitting)

    weights = dict(model_of(tiny_folders["qwen2"]).named_parameters())
    with serving(tiny_folders["qwen2"]) as engine:
        monkeypatch.setattr(Parameters, "copy_from", slow)
        updates = [engine.load_weights(1, weights.items())]
        wait_until(lambda: bool(copying))
        assert engine.statistics().policy_version == 0
        updates.append(engine.load_weights(2, weights.items()))
        submitted += engine.submit([request("a")])
        assert [update.result(timeout=60) for update in updates] == [1, 2]
        results(submitted)


def test_a_late_abort_does_not_reach_the_next_request_of_its_id(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Scheduler.step
    again = []

    def aborted_meanwhile(self: Scheduler, batch: DecodeBatch) -> Ended:
        ended = step(self, batch)
        if ended and not again:
            engine.abort(["x"])
        return ended

    monkeypatch.setattr(Scheduler, "step", aborted_meanwhile)
    with serving(tiny_folders["qwen2"], context_tokens=512) as engine:
        (first,) = engine.submit([request("x", max_new_tokens=5)])
        first.add_done_callback(lambda _: again.extend(engine.submit([request("x", max_new_tokens=300)])))
        assert first.result(timeout=60).finish_reason == "length"
        wait_until(lambda: bool(again))
        assert again[0].result(timeout=60).finish_reason == "length"


def test_futures_cannot_be_cancelled(tiny_folders: dict[str, Path]) -> None:
    weights = model_of(tiny_folders["qwen2"]).named_parameters()
    with serving(tiny_folders["qwen2"]) as engine:
        futures = engine.submit([request(str(i), max_new_tokens=100) for i in range(2)])
        update = engine.load_weights(1, weights)
        assert not any(future.cancel() for future in (*futures, update))
        assert [len(completion.tokens) for completion in results(futures)] == [100, 100]
        assert update.result(timeout=60) == 1


def test_closing_aborts_running_requests_and_refuses_new_ones(tiny_folders: dict[str, Path]) -> None:
    with serving(tiny_folders["llama"], num_slots=1, context_tokens=4096) as engine:
        requests: list[GenerationRequest] = [request(name, prompt=PROMPT, max_new_tokens=4000) for name in "ab"]
        futures = engine.submit(requests)
        engine.close()
        assert [future.result(timeout=1).finish_reason for future in futures] == ["abort", "abort"]
        with pytest.raises(EngineError, match="closed"):
            engine.submit([request("c")])
        with pytest.raises(EngineError, match="closed"):
            engine.load_weights(1, {}.items())
