"""Shared by the tests of server engines: engines on a real server, reference models, a sender."""

import asyncio
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
from support.patience import PATIENCE_S, eventually
from support.processes import command_of
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore
from transformers import PreTrainedModel

from areal_rloo.config import ServerConfig
from areal_rloo.engines.base import EngineStatistics, GenerationRequest, SamplingParameters
from areal_rloo.engines.kinds import kind_of
from areal_rloo.engines.server import (
    BucketLayout,
    ServerEngine,
    ServerKind,
    ServerPlan,
    ServerStatistics,
    UpdateGroup,
)
from areal_rloo.engines.sglang import Capabilities
from areal_rloo.engines.vllm import Capabilities as VLLMCapabilities
from areal_rloo.errors import ArealRlooError
from areal_rloo.loop_thread import LoopThread
from areal_rloo.models.fingerprint import Sample, sampled_names, take_sample
from areal_rloo.trajectory import Completion

REPO = Path(__file__).resolve().parents[2]
PROMPT = (7, 12, 33, 40, 9)
MODEL_TOKENS = 16_384  # positions of the model that the fixture `wide_folder` makes
CONTEXT_TOKENS = 16_000
_ENDLESS = 15_900  # a server generates 500 tokens/s at most, so they last half a minute
CAPABILITIES = Capabilities(
    version="0.5.23",
    tensor_parallel=1,
    data_parallel=1,
    pipeline_parallel=1,
    context_tokens=64,
    prompt_tokens=63,
    cache_tokens=640,
    radix_cache=True,
    cache_key="extra_key",
    weight_versions=True,
    update_session=True,
    seeds=False,
    overlap=False,
    digest=None,
)
VLLM_CAPABILITIES = VLLMCapabilities(
    version="0.32.0",
    tensor_parallel=1,
    data_parallel=1,
    pipeline_parallel=1,
    context_tokens=64,
    logprobs="processed_logprobs",
    weight_versions=True,
    digest="sha256",
)


@dataclass(frozen=True)
class RealServer:
    """A kind of server, and the facts of its processes and metrics that tests use.

    Attributes:
        titles: words of the command of the server and of the process that computes.
        prompt_tokens, new_tokens: regular expressions of the metrics that count tokens while requests run.
        read_path, resume_path: of the calls that read weight files and end a pause.
    """

    engine: Literal["sglang", "vllm"]
    titles: tuple[str, str]
    prompt_tokens: str
    new_tokens: str
    read_path: str
    resume_path: str

    @property
    def variable(self) -> str:
        return f"AREAL_RLOO_{self.engine.upper()}_PYTHON"

    def python(self) -> str:
        """Return the Python with the server; skip the test without the server."""
        python = os.environ.get(self.variable, str(REPO / f".venv-{self.engine}" / "bin" / "python"))
        if not os.access(python, os.X_OK):
            pytest.skip(f"no {self.engine} at {python}; run make {self.engine}, or set {self.variable}")
        return str(Path(python).absolute())


_REALTIME = r'sglang:realtime_tokens_total\{.*mode="%s".*\}'
SERVERS = {
    "sglang": RealServer(
        "sglang",
        titles=("sglang.launch_server", "sglang::scheduler"),
        prompt_tokens=_REALTIME % "prefill_(?:compute|cache)",
        new_tokens=_REALTIME % "decode",
        read_path="/update_weights_from_disk",
        resume_path="/continue_generation",
    ),
    "vllm": RealServer(
        "vllm",
        titles=("vllm.entrypoints.cli.main", "VLLM::EngineCore"),
        prompt_tokens=r"vllm:prompt_tokens_total\{.*\}",
        new_tokens=r"vllm:generation_tokens_total\{.*\}",
        read_path="/collective_rpc",
        resume_path="/resume",
    ),
}


def sglang_python() -> str:
    return SERVERS["sglang"].python()


class EngineOnThread:
    """An engine on an event loop of its own, for tests that call the engine from their thread.

    `ready` is done when the server answers, or fails with the error of the start.
    """

    def __init__(self, tested: RealServer, kind: ServerKind, plan: ServerPlan, *, log: Path, **options: Any) -> None:
        self.tested = tested
        self.log = log
        self.ready: Future[None] = Future()
        self._loop = LoopThread("engine")
        self._closing = self._loop.call(asyncio.Event)
        self._ended = threading.Event()
        self._is_closed = False
        self._engine = self._loop.call(partial(ServerEngine, kind, plan, log=log, **options))
        self._loop.begin(self._run(), lambda task: self._ended.set())

    async def _run(self) -> None:
        try:
            async with self._engine:
                self.ready.set_result(None)
                await self._closing.wait()
        except ArealRlooError as error:
            self.ready.set_exception(error)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        return self._loop.call(self._engine.submit, requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._loop.call(self._engine.abort, request_ids)

    def load_weights(self, policy_version: int, weights: Iterable[tuple[str, Tensor]]) -> Future[int]:
        return self._loop.call(self._engine.load_weights, policy_version, weights)

    def update_from_group(self, *arguments: Any) -> Future[int]:
        return self._loop.call(self._engine.update_from_group, *arguments)

    def unfinished(self) -> dict[str, Completion]:
        """Return what each request that has begun, and not ended, has so far."""
        return self._loop.call(self._engine.unfinished).result(timeout=PATIENCE_S)

    def statistics(self) -> EngineStatistics:
        return self._loop.call(self._engine.statistics)

    def server_statistics(self) -> ServerStatistics:
        return self._loop.call(self._engine.server_statistics)

    def metrics_text(self) -> str:
        return self._engine.metrics_text()

    def url(self) -> str:
        """Return the address of the server."""
        connection = self._engine._state.connection
        assert connection is not None
        return connection.api.client.url

    def close(self) -> None:
        """Close the engine; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.call(self._closing.set)
        if self.ready.done():  # else the start is cancelled
            self._ended.wait()
        self._loop.close()


def make_engine(folder: Path, log: Path, *, engine: str = "sglang", **changes: Any) -> EngineOnThread:
    """Start an engine with a server, and do not wait for the server."""
    tested = SERVERS[engine]
    own = {key: changes.pop(key) for key in list(changes) if key in ServerConfig.__struct_fields__}
    sizes = {"tensor_parallel": 1, "num_slots": 8, "context_tokens": CONTEXT_TOKENS, "num_threads": 1}
    plan = ServerPlan(folder, device="cpu", dtype="float32", **{k: changes.pop(k, v) for k, v in sizes.items()})
    defaults: dict[str, Any] = {"url": None, "update_timeout_s": 30.0}
    if not changes.get("url"):
        own = {"python": tested.python(), **own}
    kind = type(kind_of(tested.engine))(changes.pop("capabilities", None))
    return EngineOnThread(tested, kind, plan, config=ServerConfig(**own), log=log, **{**defaults, **changes})


@contextmanager
def running_engine(folder: Path, log: Path, **changes: Any) -> Iterator[EngineOnThread]:
    """Start an engine and wait until the server is ready."""
    engine = make_engine(folder, log, **changes)
    try:
        engine.ready.result(timeout=PATIENCE_S)
        yield engine
    finally:
        engine.close()


def request(name: str, *, prompt: tuple[int, ...] = PROMPT, **options: Any) -> GenerationRequest:
    outer = {key: options.pop(key) for key in ("min_version", "pinned") if key in options}
    return GenerationRequest(name, prompt, SamplingParameters(**{"max_new_tokens": 20, **options}), **outer)


def results(futures: Sequence[Future[Completion]]) -> list[Completion]:
    return [future.result(timeout=PATIENCE_S) for future in futures]


def endless(prefix: str, num: int, **options: Any) -> list[GenerationRequest]:
    """Return requests that end only when a test says so: how fast a server is compared with a test is not known."""
    return [request(f"{prefix}{i}", max_new_tokens=_ENDLESS, **options) for i in range(num)]


def begin(
    engine: EngineOnThread, requests: Sequence[GenerationRequest], num_tokens: int = 1
) -> list[Future[Completion]]:
    """Submit requests, and wait until those in the slots have begun and have this number of tokens in all."""
    prompts_before, tokens_before = _prompt_tokens(engine), _new_tokens(engine)
    futures = engine.submit(requests)
    eventually(lambda: engine.statistics().num_running > 0, "nothing runs")
    expected = sum(len(asked.prompt_tokens) for asked in requests[: engine.statistics().num_running])
    eventually(lambda: _prompt_tokens(engine) - prompts_before >= expected, "not all requests began")
    eventually(lambda: _new_tokens(engine) - tokens_before >= num_tokens, "too few tokens were generated")
    return futures


def more_tokens(engine: EngineOnThread, num_tokens: int) -> None:
    """Wait until the server has generated this number of tokens more."""
    before = _new_tokens(engine)
    eventually(lambda: _new_tokens(engine) - before >= num_tokens, "too few tokens were generated")


def stopped(
    engine: EngineOnThread, requests: Sequence[GenerationRequest], futures: Sequence[Future[Completion]]
) -> list[Completion]:
    """Abort endless requests after some more tokens of each; return their tokens so far.

    SGLang counts tokens every 40 decode steps, so up to 40 of each request are older than this call.
    """
    more_tokens(engine, 100 * len(requests))
    engine.abort([asked.request_id for asked in requests])
    completions = results(futures)
    assert {completion.finish_reason for completion in completions} == {"abort"}
    return completions


def _prompt_tokens(engine: EngineOnThread) -> float:
    return _counted(engine, engine.tested.prompt_tokens)


def _new_tokens(engine: EngineOnThread) -> float:
    return _counted(engine, engine.tested.new_tokens)


def _counted(engine: EngineOnThread, metric: str) -> float:
    """Return the tokens that the server has processed; the engine counts them only when a request ends."""
    return sum(map(float, re.findall(rf"^{metric} (\S+)$", engine.metrics_text(), re.MULTILINE)))


@torch.no_grad()
def fresh_logprobs(models: dict[int, PreTrainedModel], prompt: tuple[int, ...], completion: Completion) -> Tensor:
    """A forward of everything under the weights of each token's version: where the cache is computed again."""
    ids = torch.tensor([[*prompt, *completion.tokens.tolist()]])
    each = {
        v: models[v](ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for v in set(completion.versions.tolist())
    }
    pairs = enumerate(zip(completion.tokens.tolist(), completion.versions.tolist(), strict=True))
    return torch.stack([each[version][place, token] for place, (token, version) in pairs])


def assert_close(completion: Completion, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(torch.from_numpy(completion.behaviour_logprobs), expected, rtol=0, atol=atol)


def version_runs(completion: Completion) -> list[int]:
    """Return the versions along a completion, without repeats."""
    versions = completion.versions.tolist()
    return [v for i, v in enumerate(versions) if i == 0 or v != versions[i - 1]]


def server_processes(log: Path) -> list[psutil.Process]:
    """Return the processes of a server, with orphans: the server comes before the children."""
    return [process for process in psutil.process_iter() if _output_of(process) == str(log)]


def named(log: Path, title: str) -> psutil.Process:
    words = {process: " ".join(command_of(process)) for process in server_processes(log)}
    (found,) = [process for process, line in words.items() if title in line and "keeper.py" not in line]
    return found


def _output_of(process: psutil.Process) -> str | None:
    try:
        return str(Path(f"/proc/{process.pid}/fd/1").readlink())
    except OSError:
        return None


class Sender:
    """Rank 0 of a group that servers join, as the learner's sender."""

    def __init__(self, name: str, *, world_size: int = 2, timeout_s: float = 20.0) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.group = UpdateGroup("127.0.0.1", self._store.port, name, 1, world_size, "gloo", timeout_s)
        self._gloo: ProcessGroupGloo | None = None

    def meet(self) -> None:
        name = self.group.name
        store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self.group.timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = ProcessGroupGloo(store, 0, self.group.world_size, options)

    def send(self, buckets: Sequence[Tensor]) -> None:
        assert self._gloo is not None
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for bucket in buckets:
            self._gloo.broadcast([bucket], options).wait()

    def leave(self) -> None:
        self._gloo = None


def samples_of(model: PreTrainedModel, version: int, *, num_ranks: int = 1) -> tuple[Sample, ...]:
    """Return the samples of a version, as a sender takes the sample for servers on CPUs."""
    named_weights = dict(model.named_parameters())
    sampled = {name: named_weights[name] for name in sampled_names(named_weights, version)}
    return (take_sample(sampled, digest="sha256", num_ranks=num_ranks),)


def in_buckets(model: PreTrainedModel, num: int = 3) -> tuple[list[BucketLayout], list[Tensor]]:
    """Return a model as layouts and flat bytes, as a sender holds the model."""
    named_weights = list(model.named_parameters())
    layouts, flat = [], []
    for start in range(num):
        part = named_weights[start::num]
        layouts.append(
            BucketLayout(tuple(n for n, _ in part), ("float32",) * len(part), tuple(tuple(p.shape) for _, p in part))
        )
        flat.append(torch.cat([p.detach().flatten().view(torch.uint8) for _, p in part]))
    return layouts, flat
