"""Broadcast 200 versions in a row, with the learner's own sender, into a server that generates meanwhile."""

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.broadcasting import Broadcasting, Receiving
from support.model_versions import cached_logprobs, model_of
from support.patience import eventually
from support.server_support import (
    SERVERS,
    EngineOnThread,
    assert_close,
    request,
    running_engine,
    server_processes,
    version_runs,
)
from transformers import PreTrainedModel

from areal_rloo.rollout.engines import joins_group
from areal_rloo.trajectory import Completion
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.fingerprint import Sampler
from areal_rloo.weights.manifest import build_manifest, gather
from areal_rloo.weights.offers import Offers

NUM_VERSIONS = 200
NUM_AT_A_TIME = 12  # more than the engine's 8 slots, so that some requests always wait
NEW_TOKENS = 80
STEADY_FROM = 20  # versions
MOST_GROWTH_BYTES = 100 * 2**20  # 180 copies of the weights would be more
NUM_RECOMPUTED = 40
CPU = torch.device("cpu")

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


class Models(Mapping[int, PreTrainedModel]):
    """The weights of every version. Neighbours differ enough to reveal a wrong tag, and there is no trend."""

    def __init__(self, folder: Path) -> None:
        self._by_factor = {step: model_of(folder, factor=1 + step / 50) for step in range(11)}

    def __getitem__(self, version: int) -> PreTrainedModel:
        return self._by_factor[7 * version % 11]

    def __len__(self) -> int:
        return NUM_VERSIONS + 1

    def __iter__(self) -> Any:
        return iter(range(len(self)))


class Load:
    """An endless load with a fixed number of requests at a time; collects every completion."""

    def __init__(self, engine: EngineOnThread) -> None:
        self._engine = engine
        self._names = itertools.count()
        self._under_way: deque[tuple[tuple[int, ...], Future[Completion]]] = deque()
        self.done: list[tuple[tuple[int, ...], Completion]] = []

    def pump(self) -> None:
        """Collect finished completions, and submit as many new requests."""
        for _ in range(len(self._under_way)):
            prompt, future = self._under_way.popleft()
            if future.done():
                self.done.append((prompt, future.result()))
            else:
                self._under_way.append((prompt, future))
        while len(self._under_way) < NUM_AT_A_TIME:
            number = next(self._names)
            prompt = tuple(range(3 + number % 5, 12 + number % 7))  # some prompts repeat, in other versions too
            asked = request(str(number), prompt=prompt, max_new_tokens=NEW_TOKENS)
            self._under_way.append((prompt, self._engine.submit([asked])[0]))

    def finish(self) -> None:
        while self._under_way:
            prompt, future = self._under_way.popleft()
            self.done.append((prompt, future.result(timeout=120)))


@pytest.mark.rare
@pytest.mark.parametrize("kind", SERVERS)
def test_200_updates_under_load_lose_nothing_and_tag_tokens_correctly(
    kind: str, wide_folder: Path, tmp_path: Path
) -> None:
    folder, log = wide_folder, tmp_path / "server.log"
    models = Models(folder)
    with running_engine(folder, log, engine=kind) as engine:
        load = Load(engine)
        sizes = _publish_all(engine, models, load, lambda: _resident_bytes(log))
        load.finish()
        statistics = engine.statistics()
        proven = engine.server_statistics()
    assert statistics.weight_updates == NUM_VERSIONS
    assert (proven.proven_updates, proven.unproven_updates, proven.weight_mismatches) == (NUM_VERSIONS, 0, 0)
    assert statistics.num_finished == len(load.done)
    assert sizes[-1] - sizes[STEADY_FROM] < MOST_GROWTH_BYTES, f"bytes after each version: {sizes[::20]}"

    assert all(len(completion.tokens) == NEW_TOKENS for _, completion in load.done)
    assert all(completion.finish_reason == "length" for _, completion in load.done)
    assert all(version_runs(completion) == sorted(version_runs(completion)) for _, completion in load.done)
    spanning = [one for one in load.done if len(version_runs(one[1])) > 1]
    assert len(spanning) > len(load.done) / 2
    for prompt, completion in random.Random(0).sample(spanning, NUM_RECOMPUTED):
        assert_close(completion, cached_logprobs(models, prompt, completion))


def _publish_all(engine: EngineOnThread, models: Models, load: Load, measure: Callable[[], int]) -> list[int]:
    """Send every version through a real broadcaster and receiver; return the memory size after each."""
    manifest = build_manifest(models[0].named_parameters(), bucket_bytes=100_000)
    calls: list[int] = []
    assert len(manifest.bucket_num_bytes) > 2, "an update is of several buckets"
    notices: list[tuple[int, bytes]] = []
    broadcaster = Broadcasting(
        manifest=manifest,
        transport=CollectiveSender(manifest, host="127.0.0.1", device=CPU, timeout_s=30),
        timeout_s=30,
        send_call=lambda worker_id, offer_id: calls.append(offer_id),
        send_notice=lambda worker_id, offer_id, version, body: notices.append((offer_id, body)),
        sampler=Sampler(("sha256", "tiles"), num_ranks=1),
    )
    failures: list[str] = []
    received: list[tuple[int, int]] = []
    receiver = Receiving(
        worker_id="w",
        policy_version=lambda: engine.statistics().policy_version,
        load_weights=engine.load_weights,
        join_group=joins_group(engine, "w"),
        on_received=lambda offer_id, total: received.append((offer_id, total)),
        on_failed=lambda offer_id, detail: failures.append(detail),
        device=CPU,
    )
    broadcaster.publish(0, partial(gather, manifest, list(models[0].named_parameters())))
    broadcaster.tell(lambda offers: offers.join("w", 0, now_s=0.0))
    sizes = [measure()]
    for version in range(1, NUM_VERSIONS + 1):
        made = engine.statistics().generated_tokens
        broadcaster.publish(version, partial(gather, manifest, list(models[version].named_parameters())))

        def arrived(version: int = version, made: int = made) -> bool:
            while calls:
                broadcaster.tell(partial(Offers.ready, worker_id="w", offer_id=calls.pop()))
            while notices:
                receiver.offer(*notices.pop(0))
            while received:
                offer_id, total = received.pop()
                values = {"offer_id": offer_id, "checksum": total, "number": version, "now_s": time.monotonic()}
                broadcaster.tell(partial(Offers.received, worker_id="w", **values))
            load.pump()
            assert failures == []
            there = broadcaster.statistics().versions["w"] == version
            return there and engine.statistics().generated_tokens > made

        eventually(arrived, f"version {version} did not arrive, or nothing is generated under it")
        sizes.append(measure())
    receiver.close()
    broadcaster.close()
    return sizes


def _resident_bytes(log: Path) -> int:
    """Return memory without file pages, which the kernel evicts at will."""
    infos = [process.memory_info() for process in server_processes(log)]
    return sum(info.rss - info.shared for info in infos)
