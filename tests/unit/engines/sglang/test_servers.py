"""The start of a managed SGLang server, refused options, and weight files."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patience import eventually
from support.processes import processes_with

from areal_rloo.config import Config, RolloutConfig, ServerConfig
from areal_rloo.config.schema import validate
from areal_rloo.config.server import server_mistakes
from areal_rloo.engines.installed import SGLANG, VLLM, ServerPackage, find_python
from areal_rloo.engines.server import ServerPlan
from areal_rloo.engines.server.model_folder import WeightsFolder
from areal_rloo.engines.server.process import ServerProcess
from areal_rloo.engines.sglang import SGLang
from areal_rloo.engines.sglang.command import command_line, environment
from areal_rloo.errors import ConfigError, EngineError
from areal_rloo.launcher.long_logs import shorten
from areal_rloo.models.stored import stored_parameters

_CONTEXT_TOKENS = Config().context_tokens


def _plan(**changes: Any) -> ServerPlan:
    plan: dict[str, Any] = {
        "model_path": Path("/models/m"),
        "model_context_tokens": 4096,
        "device": "cpu",
        "dtype": "float32",
        "tensor_parallel": 1,
        "num_slots": 8,
        "context_tokens": 512,
        "num_threads": 2,
    }
    return ServerPlan(**{**plan, **changes})


def _options(arguments: dict[str, Any], plan: ServerPlan) -> dict[str, str]:
    words = command_line(arguments, plan, port=1234)
    return {
        word: words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else ""
        for i, word in enumerate(words)
        if word.startswith("--")
    }


def test_a_server_is_started_for_its_device() -> None:
    on_cpu, on_cuda = _options({}, _plan()), _options({}, _plan(device="cuda", tensor_parallel=2))
    assert on_cpu["--attention-backend"] == "torch_native"
    assert int(on_cpu["--max-total-tokens"]) >= 8 * 512
    assert int(on_cpu["--context-length"]) >= 512
    assert "--attention-backend" not in on_cuda
    assert (on_cuda["--tp-size"], on_cuda["--weight-version"]) == ("2", "0")
    assert environment(_plan()) == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    assert environment(_plan(tensor_parallel=2))["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert environment(_plan(device="cuda")) == {}
    sleeping = [_options({}, _plan(device=device, sleeps=True)) for device in ("cpu", "cuda")]
    assert ["--enable-memory-saver" in options for options in (on_cuda, *sleeping)] == [False, False, True]


def test_the_port_of_a_starting_server_is_reserved(tmp_path: Path) -> None:
    server = ServerProcess(SGLang(), sys.executable, ServerConfig(), _plan(), tmp_path / "server.log")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", server.port))
    server.kill()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", server.port))


def test_the_key_of_a_ready_server_is_in_no_file_and_no_command(tmp_path: Path) -> None:
    log, python = tmp_path / "server.log", tmp_path / "python"
    log.write_text("of an earlier run\n")
    python.write_text('#!/bin/sh\ncat "$4"; echo options; cat "$4"; echo ready; exec sleep 100\n')  # logs its options
    python.chmod(0o755)
    server = ServerProcess(SGLang(), str(python), ServerConfig(), _plan(), log)
    eventually(lambda: "ready" in log.read_text(), "the server logs nothing")
    assert log.read_text().count(server.api_key) == 2
    assert server.api_key not in Path(f"/proc/{server.pid}/cmdline").read_text()
    assert server.api_key.encode() not in Path(f"/proc/{server.pid}/environ").read_bytes()
    server.forget_secrets()
    hidden = f"api-key: {'*' * len(server.api_key)}\n"
    assert log.read_text() == f"of an earlier run\n{hidden}options\n{hidden}ready\n"
    assert log.stat().st_mode & 0o777 == 0o600
    server.kill()


def test_a_log_that_was_shortened_meanwhile_keeps_no_key_either(tmp_path: Path) -> None:
    """The launcher leaves out the middle of a long log, whoever writes it."""
    log, python = tmp_path / "server.log", tmp_path / "python"
    log.write_text("of an earlier run\n" * 10_000)
    python.write_text('#!/bin/sh\ncat "$4"; echo ValueError: ready; exec sleep 100\n')
    python.chmod(0o755)
    server = ServerProcess(SGLang(), str(python), ServerConfig(), _plan(), log)
    eventually(lambda: "ready" in log.read_text(), "the server logs nothing")
    shorten(log, 10_000)
    assert server.api_key in log.read_text()
    server.forget_secrets()
    assert server.api_key not in log.read_text()
    assert server.last_words() == "ValueError: ready"
    server.kill()


def test_a_killed_worker_leaves_no_process_of_a_server(tmp_path: Path) -> None:
    """A child that has just begun has not yet asked Linux for a signal at the end of the server."""
    log, python, mark = tmp_path / "server.log", tmp_path / "python", str(tmp_path / "mark")
    python.write_text(f"#!/bin/sh\ntail -f /dev/null {mark} & setsid tail -f /dev/null {mark} & echo up; sleep 3600\n")
    python.chmod(0o755)
    (tmp_path / "mark").touch()
    program = f"""
import sys, time
from pathlib import Path
from areal_rloo.config import ServerConfig
from areal_rloo.engines.server import ServerPlan
from areal_rloo.engines.server.process import ServerProcess
from areal_rloo.engines.sglang import SGLang
plan = ServerPlan(Path("/models/m"), "cpu", "float32", 1, 8, 512, 2, model_context_tokens=4096)
server = ServerProcess(SGLang(), {str(python)!r}, ServerConfig(), plan, Path({str(log)!r}))
time.sleep(3600)
"""
    with subprocess.Popen([sys.executable, "-c", program]) as worker:
        try:
            eventually(lambda: log.exists() and "up" in log.read_text(), "the server does not start")
        finally:
            worker.kill()
    eventually(lambda: not processes_with([mark]), "a process is left")
    assert "up" in log.read_text(), "the server had started"
    assert processes_with([mark]) == []


def test_the_fatal_error_is_reported_rather_than_a_harmless_one(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("ValueError: of an earlier run\n")
    server = ServerProcess(SGLang(), sys.executable, ServerConfig(), _plan(), log)
    server.kill()
    with log.open("a") as file:
        file.write(
            "[2026-11-22 15:02:13] ERROR:    [Errno 98] error while attempting to bind on address\n"
            "[2026-11-22 15:02:13] INFO:     Waiting for application shutdown.\n"
            "[2026-11-22 15:02:23] post-warmup freeze_gc failed\n"
            "Traceback (most recent call last):\n"
            "TimeoutError: timed out\n\n"
            "requests.exceptions.ReadTimeout: Read timed out. (read timeout=10)\n"
            "[2026-11-22 15:02:23] The server is fired up and ready to roll!\n"
        )
    assert server.last_words().endswith("[Errno 98] error while attempting to bind on address")


def test_the_context_is_limited_only_below_the_models_own() -> None:
    assert "--context-length" not in _options({}, _plan(model_context_tokens=512))
    assert "--disable-radix-cache" in _options({}, _plan(prefix_cache=False))


def test_the_users_arguments_override_ours() -> None:
    given = {"disable_overlap_schedule": False, "--mem-fraction-static": 0.5, "enable-metrics": None, "trust_x": True}
    options = _options(given, _plan())
    assert options["--mem-fraction-static"] == "0.5"
    assert options["--trust-x"] == ""
    assert not {"--disable-overlap-schedule", "--enable-metrics"} & set(options)


@pytest.mark.parametrize(
    ("sglang", "message"),
    [
        ({"arguments": {"tp_size": 2}}, r"rollout.sglang.arguments.tp_size: .*rollout.tensor_parallel"),
        ({"arguments": {"--api-key": "x"}}, r"rollout.sglang.arguments.--api-key"),
        ({"arguments": {"dp": 2}}, r"rollout.num_workers"),
        ({"urls": ("http://a:1",)}, r"rollout.sglang.urls: expected one for each of rollout.num_workers=2, got 1"),
        ({"urls": ("http://127.0.0.1:1", "http://127.0.0.1:1")}, r"rollout.sglang.urls: expected different servers"),
        ({"urls": ("a:1", "b:1")}, r"rollout.sglang.urls: expected http"),
        ({"api_key_env": "KEY"}, r"rollout.sglang.api_key_env: nothing reads it without urls"),
        (
            {"urls": ("http://127.0.0.1:1", "http://localhost:2"), "python": "p"},
            r"rollout.sglang.python: nothing reads it with urls",
        ),
        (
            {"urls": ("http://127.0.0.1:1", "http://b:1")},
            r"rollout.sglang.urls: http://b:1 is on another machine.*wire.host=127.0.0.1",
        ),
        ({"arguments": {"pp-size": 2}}, r"rollout.sglang.arguments.pp-size: .*rollout.tensor_parallel"),
        ({"arguments": {"nnodes": 2}}, r"rollout.sglang.arguments.nnodes: .*a single host"),
        ({"arguments": {"base-gpu-id": 1}}, r"rollout.sglang.arguments.base-gpu-id: .*the launcher gives"),
        ({"arguments": {"dtype": "float16"}}, r"rollout.sglang.arguments.dtype: .*set model.dtype"),
        ({"arguments": {"load-format": "dummy"}}, r"rollout.sglang.arguments.load-format: .*those of model.path"),
        *(
            (
                {"arguments": {"--mem_fraction_static": value}},
                rf"mem_fraction_static: expected a number between.*{value}",
            )
            for value in (1.8, 1, 0, -0.1, "abc", True)
        ),
        *(
            ({"arguments": {"max-total-tokens": value}}, rf"max-total-tokens: expected a whole number above 0.*{value}")
            for value in (0, -5, 0.5, "many", True)
        ),
        *(
            ({"arguments": {"context-length": value}}, rf"context-length: expected at least \d+: data.*, got {value}")
            for value in (100, "long", "32K", "1k", "600.5", "9e9", "inf", _CONTEXT_TOKENS)
        ),
    ],
)
def test_contradicting_options_are_refused(sglang: dict[str, Any], message: str) -> None:
    rollout = RolloutConfig(engine="sglang", num_workers=2, sglang=ServerConfig(**sglang))
    with pytest.raises(ConfigError, match=message):
        validate(Config(rollout=rollout))


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("sglang", {"mem-fraction-static": "0.8", "max-total-tokens": 1e6, "context-length": _CONTEXT_TOKENS + 5}),
        ("vllm", {"gpu-memory-utilization": 1.0, "kv-cache-memory-bytes": "8G", "max-model-len": _CONTEXT_TOKENS}),
        ("vllm", {"gpu-memory-utilization": "0.9", "max-model-len": "32k"}),
        ("sglang", {"max-total-tokens": "0.5M", "context-length": "32Ki", "h": True}),
        ("vllm", {"max-model-len": "auto"}),
        ("vllm", {"max-model-len": "-1"}),
        ("vllm", {"max-model-len": -1}),
    ],
)
def test_numbers_as_the_servers_write_them_are_taken(engine: Any, arguments: dict[str, Any]) -> None:
    where: dict[str, Any] = {"num_workers": 1, "wire_host": "127.0.0.1", "transport": "auto", "sleeps": False}
    server = ServerConfig(arguments=arguments)
    assert list(server_mistakes(engine, server, context_tokens=_CONTEXT_TOKENS, **where)) == []


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        ({"arguments": {"tensor_parallel_size": 2}}, r"rollout.vllm.arguments.tensor_parallel_size: .*tensor_parallel"),
        ({"arguments": {"--logprobs-mode": "raw_logprobs"}}, r"rollout.vllm.arguments.--logprobs-mode"),
        ({"arguments": {"gpu-memory-utilization": 1.5}}, r"gpu-memory-utilization: expected a number between 0 and 1"),
        ({"arguments": {"kv-cache-memory-bytes": "8 GB"}}, r"kv-cache-memory-bytes: expected a whole number above 0"),
        ({"arguments": {"max-model-len": 64}}, r"max-model-len: expected at least"),
        ({"arguments": {"max-model-len": "0.1k"}}, r"max-model-len: expected at least \d+: .*, got 0.1k"),
        ({"arguments": {"gpu-memory-utilization": "9k"}}, r"gpu-memory-utilization: expected a number between 0 and 1"),
        ({"arguments": {"kv-cache-memory-bytes": "1.5K"}}, r"kv-cache-memory-bytes: expected a whole number above 0"),
        ({"arguments": {"data_parallel": 2}}, r"data_parallel: the beginning of data-parallel-size, .*num_workers"),
        ({"arguments": {"tokenizer": "x"}}, r"rollout.vllm.arguments.tokenizer: .*that of model.path"),
        ({"urls": ("http://a:1",)}, r"rollout.vllm.urls: expected one for each of rollout.num_workers=2, got 1"),
        ({"api_key_env": "KEY"}, r"rollout.vllm.api_key_env: nothing reads it without urls"),
    ],
)
def test_contradicting_options_of_vllm_are_refused(vllm: dict[str, Any], message: str) -> None:
    rollout = RolloutConfig(engine="vllm", num_workers=2, vllm=ServerConfig(**vllm))
    with pytest.raises(ConfigError, match=message):
        validate(Config(rollout=rollout))


def test_tensor_parallel_needs_a_server() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel: expected 1 with rollout.engine=embedded, got 2"):
        validate(Config(rollout=RolloutConfig(tensor_parallel=2)))
    for engine in ("sglang", "vllm"):
        validate(Config(rollout=RolloutConfig(tensor_parallel=2, engine=engine)))


def test_weight_files_are_owner_only_and_removed_after_a_crash(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_rloo.files._MEMORY", tmp_path)
    abandoned = tmp_path / "areal_rloo-weights-of-the-dead"
    abandoned.mkdir(mode=0o700)
    (abandoned / "lock").touch()
    parameters = stored_parameters("model.path", tiny_folders["qwen2"])
    folder = WeightsFolder(parameters)
    assert not abandoned.exists()
    other = WeightsFolder(parameters)
    weights = {name: torch.zeros(tensor.shape) for name, tensor in parameters.items()}
    written = folder.write(1, weights.items())
    assert written.is_relative_to(tmp_path), "the folder of a live process is left alone"
    assert written.stat().st_mode & 0o077 == 0
    folder.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_named_sglang_on_the_path_is_not_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"found none at .*venv-sglang"):
        find_python(SGLANG, ServerConfig(), on_gpus=False)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -KILL $$", r"was killed by signal 9 before it said if it has sglang$"),
        ("kill -TERM $$", r"was killed by signal 15 before it said if it has sglang$"),
        (
            "exec sleep 60",
            r"does not say within 0 s if it has sglang; is the machine, or the disk of this Python, busy\?$",
        ),
    ],
)
def test_a_python_killed_or_slow_is_not_one_without_a_server(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_rloo.engines.installed._VERSION_TIMEOUT_S", 0.3)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=words):
        find_python(SGLANG, ServerConfig(python=str(python)), on_gpus=False)


@pytest.mark.parametrize("package", [SGLANG, VLLM])
def test_an_environment_for_cpus_is_refused_for_gpus(package: ServerPackage, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    (packages / f"{package.distribution}-1.0.dist-info").mkdir(parents=True)
    (packages / f"{package.distribution}-1.0.dist-info" / "METADATA").write_text("Version: 1.0\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = ServerConfig(python=str(python))
    assert find_python(package, config, on_gpus=True) == str(python)
    shims = Path(__file__).resolve().parents[3] / package.distribution / "shims"
    (packages / f"{package.shim}.py").write_bytes((shims / f"{package.shim}.py").read_bytes())
    assert find_python(package, config, on_gpus=False) == str(python)
    with pytest.raises(
        ConfigError, match=rf"make {package.distribution}, which uses no GPU; run pip install '"
    ) as raised:
        find_python(package, config, on_gpus=True)
    assert "run make" not in str(raised.value)
    assert raised.value.absent, "a dry run shows the plan beside it"
