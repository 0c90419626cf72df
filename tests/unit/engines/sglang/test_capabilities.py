"""Read the capabilities of an SGLang server; refuse servers that do not fit."""

from typing import Any

import pytest

from areal_rloo.engines.sglang import Capabilities
from areal_rloo.engines.sglang.capabilities import check_capabilities, read_capabilities
from areal_rloo.errors import ConfigError

_BODIES = {
    "/generate": ("input_ids", "sampling_params", "return_logprob", "rid", "extra_key", "cache_salt"),
    "/abort_request": ("rid", "abort_all"),
    "/pause_generation": ("mode",),
    "/init_weights_update_group": ("master_address", "rank_offset", "world_size", "group_name", "backend"),
    "/destroy_weights_update_group": ("group_name",),
    "/update_weights_from_distributed": ("names", "dtypes", "shapes", "load_format", "flush_cache", "weight_version"),
    "/update_weights_from_disk": ("model_path", "flush_cache", "weight_version"),
}
_BARE = ("/continue_generation", "/begin_weight_update", "/end_weight_update", "/health")
_INFO = {
    "version": "0.5.23",
    "tp_size": 1,
    "dp_size": 1,
    "max_req_input_len": 1018,
    "max_total_num_tokens": 8000,
    "disable_radix_cache": False,
}
_MODELS = {"data": [{"max_model_len": 1024}]}
_PROBE = {"meta_info": {"weight_versions": []}}


def _description(*, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Make an OpenAPI document in FastAPI's form; `without` names paths to leave out, or fields."""
    paths: dict[str, Any] = {path: {"post": {}} for path in _BARE}
    schemas = {}
    for path, fields in _BODIES.items():
        reference = {"schema": {"$ref": f"#/components/schemas/{path[1:]}"}}
        paths[path] = {"post": {"requestBody": {"content": {"application/json": reference}}}}
        schemas[path[1:]] = {"properties": {field: {} for field in fields if field not in without}}
    return {
        "paths": {path: value for path, value in paths.items() if path not in without},
        "components": {"schemas": schemas},
    }


def _read(*without: str, info: dict[str, Any] | None = None, probe: dict[str, Any] | None = None) -> Capabilities:
    return read_capabilities(_description(without=without), {**_INFO, **(info or {})}, _MODELS, probe=probe or _PROBE)


def _check(found: Capabilities, **changes: Any) -> None:
    asked = {"key": "rollout.sglang.urls", "tensor_parallel": 1, "context_tokens": 512, "pause": "in_place"}
    check_capabilities(found, **{**asked, **changes})


def test_capabilities_are_read_from_the_servers_description() -> None:
    found = _read()
    assert (found.version, found.context_tokens, found.prompt_tokens) == ("0.5.23", 1024, 1018)
    assert found.update_session
    assert found.weight_versions
    assert found.cache_key == "extra_key"
    assert not found.seeds


def test_differences_between_releases_are_detected() -> None:
    assert not _read("/begin_weight_update").update_session
    assert not _read(probe={"meta_info": {}}).weight_versions
    assert _read("extra_key").cache_key == "cache_salt"
    assert _read("extra_key", "cache_salt").cache_key is None
    assert _read(info={"enable_deterministic_inference": True}).seeds
    assert _read(info={"disable_overlap_schedule": False}).overlap
    assert not _read(info={"disable_overlap_schedule": True}).overlap


@pytest.mark.parametrize("lacks", ["/pause_generation", "/update_weights_from_disk", "load_format", "mode"])
def test_an_early_server_is_refused_with_the_version_to_install(lacks: str) -> None:
    with pytest.raises(ConfigError, match=rf"SGLang 0.5.23 and has no .*{lacks}.*install sglang==0.5.23"):
        _read(lacks)


def test_a_server_without_its_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_req_input_len"):
        read_capabilities(_description(), {"version": "0.3", "tp_size": 1, "dp_size": 1}, _MODELS, probe=_PROBE)


@pytest.mark.parametrize(
    ("info", "asked", "message"),
    [
        ({"dp_size": 2}, {}, "expected a server with dp_size 1, got 2"),
        ({"tp_size": 4}, {}, "expected a server with tp_size 1.*got 4"),
        ({"pp_size": 2}, {}, "expected a server with pp_size 1, got 2"),
        ({"max_req_input_len": 300}, {}, "expected room for 512 tokens.*longest prompt 300"),
        ({"max_total_num_tokens": 400}, {}, "expected room for 512 tokens.*got a server for 400"),
        ({}, {"context_tokens": 2000}, "expected room for 2000 tokens.*got a server for 1019"),
    ],
)
def test_a_server_that_does_not_fit_the_config_is_refused(
    info: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"rollout.sglang.urls: {message}"):
        _check(_read(info=info), **asked)


def test_pausing_in_place_needs_separate_cached_prompts() -> None:
    with pytest.raises(ConfigError, match="disable-radix-cache"):
        _check(_read("extra_key", "cache_salt"))
    _check(_read("extra_key", "cache_salt"), pause="retract")
    _check(_read("extra_key", "cache_salt", info={"disable_radix_cache": True}))
