"""Measure the pause and the cost of a weight update on a generating SGLang server.

    python -m benchmarks.sglang_pause [--sglang .venv-sglang/bin/python] [--output benchmarks/results/sglang_pause.json]

The real server runs on this machine: a model of about 20 M parameters in float32, 16 running completions at any time,
and the learner's own broadcaster as sender. Each method has a separate server and receives the same versions:

    in_place   through the process group; the cache is kept
    retract    through the process group; the cache is computed again
    abort      through the process group; completions return and are sent again, as for servers without version tags
    files      in_place, through files in memory (weights.transport=shared_memory)

`pause_ms` is the median time from the pause to the continue. `cost_ms` is the generation time lost per update: the
measured seconds minus the seconds for the same number of tokens without updates. Lost tokens belong to completions that
returned early.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_rloo.config import ServerConfig
from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.server import ServerEngine, ServerPlan
from areal_rloo.engines.sglang import Capabilities, SGLang
from areal_rloo.errors import WeightsError
from areal_rloo.rollout.engines import joins_group
from areal_rloo.trajectory import Completion
from areal_rloo.weights.broadcast import Broadcaster
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.manifest import build_manifest, gather
from areal_rloo.weights.offers import Offers
from areal_rloo.weights.receive import Receiver
from benchmarks import hardware

NUM_AT_A_TIME = 16
PROMPT_TOKENS = 128
NEW_TOKENS = 64
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sglang", default=".venv-sglang/bin/python", help="from `make sglang`")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hardware.write(arguments.output, measure(arguments.sglang, num_updates=arguments.updates))


def measure(python: str, *, num_updates: int) -> dict[str, Any]:
    """Return all results by update method."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        model = _model()
        model.save_pretrained(folder)
        measured = {
            way: asyncio.run(_of(way, python, folder, model, Path(name), num_updates))
            for way in ("in_place", "retract", "abort", "files")
        }
    megabytes = sum(tensor.numel() * 4 for tensor in model.parameters()) / 2**20
    return {
        "model_mb": round(megabytes, 1),
        "num_updates": num_updates,
        **measured,
        "abort_over_in_place_cost": round(measured["abort"]["cost_ms"] / measured["in_place"]["cost_ms"], 2),
    }


async def _of(
    way: str, python: str, folder: Path, model: Qwen2ForCausalLM, logs: Path, num_updates: int
) -> dict[str, float]:
    """Run worker and learner on one event loop, and return the row of the method."""
    made = ServerEngine(
        SGLang(_without_tags() if way == "abort" else None),
        ServerPlan(
            folder,
            device="cpu",
            dtype="float32",
            tensor_parallel=1,
            num_slots=NUM_AT_A_TIME,
            context_tokens=PROMPT_TOKENS + NEW_TOKENS,
            num_threads=1,
        ),
        config=ServerConfig(python=python, pause="retract" if way == "retract" else "in_place"),
        url=None,
        update_timeout_s=60.0,
        log=logs / f"{way}.log",
    )
    async with made as engine:
        load = _Load(engine)
        publisher = _Publisher(engine, model, through_files=way == "files")
        await publisher.start()
        await load.run_for(3.0)
        rate = await load.run_for(15.0)
        pauses, started, before = [], time.perf_counter(), load.made()
        for version in range(1, num_updates + 1):
            await publisher.publish(version, load)
            pauses.append(engine.server_statistics().last_pause_s)
            await load.run_for(0.5)
        elapsed, tokens = time.perf_counter() - started, load.made() - before
        await publisher.close()
        lost = await load.finish()
    row = {
        "pause_ms": round(1e3 * statistics.median(pauses), 1),
        "longest_pause_ms": round(1e3 * max(pauses), 1),
        "cost_ms": round(1e3 * (elapsed - tokens / rate) / num_updates, 1),
        "tokens_per_s_without_updates": round(rate, 1),
        "tokens_lost": lost,
    }
    print("sglang", way, row, flush=True)
    return row


class _Load:
    """Keep a fixed number of running completions of equal length."""

    def __init__(self, engine: ServerEngine) -> None:
        self._engine = engine
        self._names = itertools.count()
        self._under_way: deque[Future[Completion]] = deque()
        self._lost = 0

    def made(self) -> int:
        return self._engine.statistics().generated_tokens

    def pump(self) -> None:
        for _ in range(len(self._under_way)):
            future = self._under_way.popleft()
            if future.done():
                self._lost += NEW_TOKENS - len(future.result().tokens)
            else:
                self._under_way.append(future)
        while len(self._under_way) < NUM_AT_A_TIME:
            number = next(self._names)
            prompt = tuple((7 * number + place) % 1000 for place in range(PROMPT_TOKENS))
            sampling = SamplingParameters(max_new_tokens=NEW_TOKENS)
            self._under_way += self._engine.submit([GenerationRequest(str(number), prompt, sampling)])

    async def run_for(self, seconds: float) -> float:
        """Return tokens per second."""
        started, made = time.perf_counter(), self.made()
        while time.perf_counter() - started < seconds:
            self.pump()
            await asyncio.sleep(0.005)
        return (self.made() - made) / (time.perf_counter() - started)

    async def finish(self) -> int:
        """Return the total of lost tokens."""
        async with asyncio.timeout(120):
            for future in self._under_way:
                self._lost += NEW_TOKENS - len((await asyncio.wrap_future(future)).tokens)
        return self._lost


class _Publisher:
    """Act as the learner: broadcast a version and wait until the engine runs this version."""

    def __init__(self, engine: ServerEngine, model: Qwen2ForCausalLM, *, through_files: bool) -> None:
        self._engine = engine
        self._model = model
        self._through_files = through_files
        manifest = build_manifest(model.named_parameters(), bucket_bytes=16 * 2**20)
        transport = CollectiveSender(manifest, host="127.0.0.1", device=CPU, timeout_s=60)
        self._offers = Offers(together=True, timeout_s=60, call_timeout_s=1)
        self._broadcaster = Broadcaster(manifest=manifest, transport=transport, offers=self._offers)
        self._notices: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self._receiver = Receiver(
            worker_id="w",
            policy_version=lambda: engine.statistics().policy_version,
            load_weights=engine.load_weights,
            join_group=joins_group(engine, "w"),
            device=CPU,
        )
        self._gather = partial(gather, manifest, list(model.named_parameters()))
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        offering = self._broadcaster.run(self._ready, self._notice)
        self._offers.join("w", 0, now_s=time.monotonic())
        self._tasks = [asyncio.create_task(offering), asyncio.create_task(self._acknowledge())]
        await self._publish(0)

    def _ready(self, worker_id: str, offer_id: int) -> None:
        self._offers.ready(worker_id, offer_id)
        self._broadcaster.changed()

    def _notice(self, worker_id: str, offer_id: int, policy_version: int, body: bytes) -> None:
        self._notices.put_nowait((offer_id, body))

    async def _acknowledge(self) -> None:
        for number in itertools.count(1):
            offer_id, body = await self._notices.get()
            try:
                checksum = await self._receiver.receive(body)
            except WeightsError as error:
                print("failed:", error)
                self._offers.failed("w", offer_id, str(error), number=number, now_s=time.monotonic())
            else:
                self._offers.received("w", offer_id, checksum, number=number, now_s=time.monotonic())
            self._broadcaster.changed()

    async def _publish(self, version: int) -> None:
        buckets = await self._broadcaster.stage()
        await asyncio.to_thread(self._gather, buckets)
        self._broadcaster.publish(version, buckets)

    async def publish(self, version: int, load: _Load) -> None:
        if self._through_files:
            future = self._engine.load_weights(version, list(self._model.named_parameters()))
            while not future.done():
                await load.run_for(0.01)
            future.result()
            return
        await self._publish(version)
        while self._broadcaster.statistics().versions["w"] < version:
            await load.run_for(0.01)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._broadcaster.close()


def _model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=8192,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=10,
            num_attention_heads=6,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def _without_tags() -> Capabilities:
    """Return the capabilities of the server without per-token versions."""
    return Capabilities(
        version="0.5.23",
        tensor_parallel=1,
        data_parallel=1,
        pipeline_parallel=1,
        context_tokens=PROMPT_TOKENS + NEW_TOKENS,
        prompt_tokens=PROMPT_TOKENS + NEW_TOKENS,
        cache_tokens=10**6,
        radix_cache=True,
        cache_key="extra_key",
        weight_versions=False,
        update_session=True,
        seeds=False,
        overlap=False,
        digest=None,
    )


if __name__ == "__main__":
    main()
