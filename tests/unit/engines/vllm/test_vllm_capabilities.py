"""Read the capabilities of a vLLM server; refuse servers that do not fit; the command of a managed server."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from areal_rloo.engines.server import ServerPlan
from areal_rloo.engines.server.client import ServerClient
from areal_rloo.engines.vllm import VLLM, Capabilities
from areal_rloo.engines.vllm.capabilities import ask_capabilities, check_capabilities, read_capabilities
from areal_rloo.errors import ConfigError

PATHS = (
    *("/inference/v1/generate", "/inference/v1/abort_requests", "/pause", "/resume", "/collective_rpc"),
    *("/update_weight_version", "/reset_prefix_cache"),
)
FACTS = {
    "protocol": 1,
    "rank": 0,
    "tensor_parallel": 1,
    "data_parallel": 1,
    "pipeline_parallel": 1,
    "quantization": None,
    "logprobs": "processed_logprobs",
}
MODELS = {"data": [{"max_model_len": 1024}]}
PROBE = {"choices": [{"weight_versions": [{"version": "0", "start": 0, "end": 1}]}]}


def _read(*, probe: dict[str, Any] = PROBE, **facts: Any) -> Capabilities:
    return read_capabilities("0.32.0", MODELS, [{**FACTS, **facts}], probe=probe)


def _asked(*, without: str = "", ranks: list[Any] | None = None) -> Capabilities:
    async def answer(asked: web.Request) -> web.Response:
        match asked.path:
            case "/openapi.json":
                return web.json_response({"paths": {path: {} for path in PATHS if path != without}})
            case "/v1/models":
                return web.json_response(MODELS)
            case "/collective_rpc" if ranks is None:
                return web.json_response({"error": {"message": "no attribute 'areal_describe'"}}, status=500)
            case "/collective_rpc":
                return web.json_response({"results": ranks})
        return web.json_response({"version": "0.32.0", **PROBE})

    async def main() -> Capabilities:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(app) as server:
            client = ServerClient(str(server.make_url("/")), api_key=None)
            try:
                return await ask_capabilities(client, timeout_s=10.0)
            finally:
                await client.close()

    return asyncio.run(main())


def test_capabilities_are_asked_of_the_server_and_its_workers() -> None:
    found = _asked(ranks=[FACTS])
    assert found == _read()
    assert (found.version, found.context_tokens, found.prompt_tokens) == ("0.32.0", 1024, 1023)
    assert found.weight_versions
    assert found.digest == "sha256"


def test_a_quantized_or_untagged_server_is_noticed() -> None:
    assert _read(quantization="fp8").digest is None
    assert not _read(probe={"choices": [{}]}).weight_versions


@pytest.mark.parametrize(
    ("without", "remedy"),
    [("/inference/v1/generate", "--enable-scale-out"), ("/pause", "VLLM_SERVER_DEV_MODE=1")],
)
def test_a_server_without_an_endpoint_is_refused_with_the_option(without: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM 0.32.0 and has no endpoint {without}; .*{remedy}"):
        _asked(without=without, ranks=[FACTS])


def test_a_server_without_our_extension_is_refused_with_the_options() -> None:
    with pytest.raises(ConfigError, match=r"no attribute 'areal_describe'.*--worker-extension-cls.*PYTHONPATH"):
        _asked()
    with pytest.raises(ConfigError, match="extension of another release"):
        _read(protocol=0)


@pytest.mark.parametrize(
    ("facts", "asked", "message"),
    [
        ({"data_parallel": 2}, {}, "data-parallel-size 1, got 2"),
        ({"tensor_parallel": 4}, {}, "tensor-parallel-size 1, as rollout.tensor_parallel says, got 4"),
        ({"pipeline_parallel": 2}, {}, "pipeline-parallel-size 1, got 2"),
        ({"logprobs": "raw_logprobs"}, {}, "logprobs-mode processed_logprobs, got raw_logprobs"),
        ({}, {"context_tokens": 2000}, "expected room for 2000 tokens.*got a server for 1024"),
    ],
)
def test_a_server_that_does_not_fit_the_config_is_refused(
    facts: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"rollout.vllm.urls: .*{message}"):
        check_capabilities(
            _read(**facts), key="rollout.vllm.urls", **{"tensor_parallel": 1, "context_tokens": 512, **asked}
        )


def _options(arguments: dict[str, Any], **changes: Any) -> dict[str, str]:
    plan: dict[str, Any] = {"device": "cpu", "dtype": "float32", "tensor_parallel": 1, "num_slots": 8}
    plan |= {"context_tokens": 512, "num_threads": 2, **changes}
    made = ServerPlan(Path("/models/m"), **plan)
    words = VLLM().command("python", arguments, made, port=1234, config=Path("/secrets.yaml"))
    assert words[:6] == ["python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/m", "--config"]
    return {
        word: words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else ""
        for i, word in enumerate(words)
        if word.startswith("--")
    }


def test_a_server_is_started_for_its_device() -> None:
    on_cpu, on_cuda = _options({}), _options({}, device="cuda", tensor_parallel=2)
    assert "--enforce-eager" in on_cpu
    assert "--enforce-eager" not in on_cuda
    assert (on_cpu["--kv-cache-memory-bytes"], "--kv-cache-memory-bytes" in on_cuda) == ("1073741824", False)
    assert on_cuda["--tensor-parallel-size"] == "2"
    sleeping = [_options({}, device=device, sleeps=True) for device in ("cpu", "cuda")]
    assert ["--enable-sleep-mode" in options for options in (on_cuda, *sleeping)] == [False, False, True]
    assert (on_cpu["--max-model-len"], on_cpu["--max-num-seqs"]) == ("512", "8")
    assert "--no-enable-prefix-caching" not in on_cpu
    assert _options({}, model_context_tokens=256)["--max-model-len"] == "256", "vLLM would not start with more"


def test_the_users_arguments_override_ours_but_not_the_fixed_ones() -> None:
    options = _options({"enforce_eager": False, "--gpu-memory-utilization": 0.5, "max_num_seqs": 4})
    assert "--enforce-eager" not in options
    assert (options["--gpu-memory-utilization"], options["--max-num-seqs"]) == ("0.5", "4")
    assert options["--worker-extension-cls"] == "areal_rloo_vllm.Weights"


def test_the_environment_of_a_server_finds_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    plan = ServerPlan(Path("/models/m"), "cpu", "float32", 1, 8, 512, 2)
    found = VLLM().environment(plan)
    inside, mine = found["PYTHONPATH"].split(":")
    assert (Path(inside) / "areal_rloo_vllm.py").is_file()
    assert mine == "/mine"
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in found, "the variable would override kv-cache-memory-bytes"
    assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("2", "")


def test_every_file_names_the_tested_version() -> None:
    repo = Path(__file__).resolve().parents[4]
    assert f"\nvllm-cpu=={VLLM.package.tested_version}\n" in (repo / "tests" / "vllm" / "requirements.txt").read_text()
    assert (
        repo / "tests" / "vllm" / "shims" / f"vllm-{VLLM.package.tested_version}+cpu.dist-info" / "METADATA"
    ).is_file()
    assert f"'vllm=={VLLM.package.tested_version}'" in (repo / "docs" / "engines.md").read_text()
