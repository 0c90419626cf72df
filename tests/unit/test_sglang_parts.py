"""The pure parts of the SGLang engine: what a server can do, what its answers mean, how it is started."""

import json
import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_rloo.config import Config, RolloutConfig, SGLangConfig
from areal_rloo.config.schema import validate
from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.sglang import Capabilities
from areal_rloo.engines.sglang.capabilities import check_capabilities, read_capabilities, versions_of
from areal_rloo.engines.sglang.flight import Flight, Output, read_output
from areal_rloo.engines.sglang.flight_queue import FlightQueue
from areal_rloo.engines.sglang.model_folder import WeightsFolder, read_model
from areal_rloo.engines.sglang.process import ServerPlan, command_line, environment
from areal_rloo.errors import ConfigError, EngineError

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
    """An OpenAPI document as FastAPI writes it; `without` names paths, or fields of any body."""
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


def test_a_server_is_known_by_its_own_description() -> None:
    found = _read()
    assert (found.version, found.context_tokens, found.prompt_tokens) == ("0.5.23", 1024, 1018)
    assert found.update_session
    assert found.weight_versions
    assert found.cache_key == "extra_key"
    assert not found.seeds


def test_what_differs_between_releases_is_seen() -> None:
    assert not _read("/begin_weight_update").update_session
    assert not _read(probe={"meta_info": {}}).weight_versions
    assert _read("extra_key").cache_key == "cache_salt"
    assert _read("extra_key", "cache_salt").cache_key is None
    assert _read(info={"enable_deterministic_inference": True}).seeds
    assert _read(info={"disable_overlap_schedule": False}).overlap
    assert not _read(info={"disable_overlap_schedule": True}).overlap


@pytest.mark.parametrize("lacks", ["/pause_generation", "/update_weights_from_disk", "load_format", "mode"])
def test_a_server_that_is_too_early_is_refused_with_what_it_lacks_and_what_to_install(lacks: str) -> None:
    with pytest.raises(ConfigError, match=rf"SGLang 0.5.23 and has no .*{lacks}.*install sglang==0.5.23"):
        _read(lacks)


def test_numbers_a_server_does_not_say_are_a_refusal() -> None:
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


def test_in_place_needs_the_caches_of_two_versions_apart() -> None:
    with pytest.raises(ConfigError, match="disable-radix-cache"):
        _check(_read("extra_key", "cache_salt"))
    _check(_read("extra_key", "cache_salt"), pause="retract")
    _check(_read("extra_key", "cache_salt", info={"disable_radix_cache": True}))


def _span(version: object, start: object, end: object) -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


def test_spans_become_one_version_for_each_token() -> None:
    assert versions_of([_span("3", 0, 2), _span("5", 2, 5)], 5) == [3, 3, 5, 5, 5]
    assert versions_of([_span("3", 0, 0)], 0) == []


def test_tokens_of_weights_without_a_version_are_left_out_and_all_behind_them() -> None:
    assert versions_of([_span("3", 0, 2), _span("default", 2, 4), _span("4", 4, 5)], 5) == [3, 3]


@pytest.mark.parametrize(
    "spans",
    [
        None,
        "3",
        [],
        [{"version": "3"}],
        [_span("3", 0, 4)],
        [_span("3", 1, 5)],
        [_span("3", 0, 2), _span("4", 3, 5)],
        [_span("3", 0, 3), _span("4", 2, 5)],
        [_span("3", 0, 6)],
        [_span("3", 0, 3), _span("4", 3, 1)],
        [_span("3", "0", 5)],
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_an_error(spans: object) -> None:
    with pytest.raises(EngineError, match="expected"):
        versions_of(spans, 5)


def _answer(tokens: list[Any], logprobs: list[Any], reason: str = "length", **meta: Any) -> dict[str, Any]:
    triples = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    spans = [_span("1", 0, len(tokens))]
    return {
        "output_ids": tokens,
        "meta_info": {
            "output_token_logprobs": triples,
            "finish_reason": {"type": reason},
            "weight_versions": spans,
            **meta,
        },
    }


def _output(answer: dict[str, Any], *, spans: bool = True, late_tokens: bool = False, sent_version: int = 7) -> Output:
    return read_output(answer, sent_version=sent_version, spans=spans, late_tokens=late_tokens, vocab_size=100)


def test_an_answer_becomes_a_segment() -> None:
    stopped = _output(_answer([1, 2], [-0.5, -1], "stop"), sent_version=1)
    assert stopped == Output([1, 2], [-0.5, -1], [1, 1], "stop")
    assert _output(_answer([1, 2], [-0.5, -1], "abort"), spans=False) == Output([1, 2], [-0.5, -1], [7, 7], "cut")


def test_a_server_that_launches_ahead_gives_its_late_tokens_the_version_before() -> None:
    """Of an update after two tokens, the server calls the third one new; the former weights had sampled it already."""
    answer = _answer([1, 2, 3, 4], [-1.0] * 4, weight_versions=[_span("7", 0, 2), _span("8", 2, 4)])
    assert _output(answer, late_tokens=True).versions == [7, 7, 7, 8]
    assert _output(answer).versions == [7, 7, 8, 8]
    first = _answer([1, 2], [-1.0] * 2, weight_versions=[_span("8", 0, 2)])
    assert _output(first, late_tokens=True).versions == [7, 8]
    assert _output(first, late_tokens=True, sent_version=8).versions == [8, 8]


def test_an_update_that_overtook_a_request_is_seen_whatever_the_tags() -> None:
    answer = _answer([1, 2], [-1.0] * 2, weight_versions=[_span("8", 0, 2)])
    assert _output(answer).overtaken
    assert _output(answer, late_tokens=True).overtaken
    assert not _output(answer, sent_version=8).overtaken


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "expected output_ids"),
        (_answer([1], [None]), "not a finite number"),
        (_answer([1], [math.nan]), "not a finite number"),
        (_answer([1], [-math.inf]), "not a finite number"),
        (_answer([100], [-1.0]), "expected token ids below 100"),
        (_answer([-1], [-1.0]), "expected token ids below 100"),
        (_answer([1], [-1.0], "bored"), "expected finish_reason"),
        (_answer([1, 2], [-1.0, -1.0], output_token_logprobs=[[-1.0, 1, None]]), "expected the logprob of each"),
        (_answer([1], [-1.0], weight_versions=[_span("1", 0, 9)]), "expected weight_versions of all"),
    ],
)
def test_an_answer_that_cannot_be_right_is_an_error(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        _output(answer)


def _flight(**sampling: Any) -> Flight:
    parameters = SamplingParameters(**{"max_new_tokens": 10, **sampling})
    return Flight(GenerationRequest("a", (5, 6), parameters), Future(), 0)


def test_a_flight_that_was_cut_goes_on_from_its_segments() -> None:
    flight = _flight(min_new_tokens=4, seed=2**64 - 1)
    flight.add(Output([7, 8, 9], [-1.0] * 3, [2] * 3, "cut"))
    body = flight.next_body(_read(info={"enable_deterministic_inference": True}), "n-3")
    assert body["input_ids"] == [5, 6, 7, 8, 9]
    assert body["extra_key"] == "n-3"
    assert body["sampling_params"]["max_new_tokens"] == 7
    assert body["sampling_params"]["min_new_tokens"] == 1
    assert body["sampling_params"]["sampling_seed"] < 2**63
    assert flight.next_body(_read(), "n-3")["rid"] != body["rid"]


def test_a_flight_that_fills_the_context_begins_again() -> None:
    flight = _flight()
    flight.add(Output([7, 8, 9], [-1.0] * 3, [2] * 3, "cut"))
    assert flight.next_body(_read(info={"max_req_input_len": 4}), "n-3")["input_ids"] == [5, 6]
    assert flight.versions == []


def test_only_a_request_without_stop_tokens_ignores_the_end_of_sequence() -> None:
    assert _flight().next_body(_read(), "n-0")["sampling_params"]["ignore_eos"]
    params = _flight(stop_token_ids=(3,), top_k=5, top_p=0.5).next_body(_read(), "n-0")["sampling_params"]
    assert "ignore_eos" not in params
    assert (params["stop_token_ids"], params["top_k"], params["top_p"]) == ([3], 5, 0.5)
    greedy = _flight(greedy=True, temperature=0.7).next_body(_read(), "n-0")["sampling_params"]
    assert (greedy["temperature"], greedy["top_k"]) == (0.0, -1)


@pytest.mark.parametrize(
    ("sampling", "tokens", "end"),
    [
        ({"stop_token_ids": (9,)}, [7, 9], "stop"),
        ({"stop_token_ids": (9,), "min_new_tokens": 5}, [7, 9], None),
        ({"max_new_tokens": 2}, [7, 8], "length"),
        ({}, [7, 8], None),
        ({}, [], None),
    ],
)
def test_a_cut_at_the_very_end_is_the_end(sampling: dict[str, Any], tokens: list[int], end: str | None) -> None:
    flight = _flight(**sampling)
    output = Output(tokens, [-1.0] * len(tokens), [0] * len(tokens), "cut")
    flight.add(output)
    assert flight.end_of(output) == end


def _queue(num_slots: int = 2) -> FlightQueue:
    return FlightQueue(num_slots=num_slots, context_tokens=64, vocab_size=100)


def _requests(*names: str, min_version: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(name, (5,), SamplingParameters(max_new_tokens=4), min_version) for name in names]


def _names(flights: list[Flight]) -> list[str]:
    return [flight.request.request_id for flight in flights]


def test_what_comes_back_goes_to_its_place_in_the_queue() -> None:
    queue = _queue()
    queue.submit(_requests("a", "b", "c", "d"))
    taken = queue.take(0)
    assert _names(taken) == ["a", "b"]
    assert queue.take(0) == []
    queue.put_back(reversed(taken))
    assert _names(queue.take(0)) == ["a", "b"]
    assert queue.resumed == 2


def test_a_flight_for_later_weights_does_not_hold_up_the_others() -> None:
    queue = _queue()
    queue.submit(_requests("later", min_version=2))
    queue.submit(_requests("a", "b"))
    assert _names(queue.take(1)) == ["a", "b"]
    queue.put_back(queue.under_way())
    assert _names(queue.take(2)) == ["later", "a"]


def test_every_future_is_done_once_whatever_ends_the_queue() -> None:
    queue = _queue()
    futures = queue.submit(_requests("a", "b", "c"))
    (first, _) = queue.take(0)
    queue.landed(first, Output([1, 2, 3, 4], [-1.0] * 4, [0] * 4, "length"))
    assert queue.abort(["c"]) == []
    assert queue.abort(["b", "a"]) == queue.under_way()
    queue.close(EngineError("gone"), failed=True)
    assert futures[0].result(timeout=0).finish_reason == "length"
    assert futures[2].result(timeout=0).finish_reason == "abort"
    assert isinstance(futures[1].exception(timeout=0), EngineError)
    with pytest.raises(EngineError, match="gone"):
        queue.submit(_requests("d"))


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


def test_the_context_is_limited_only_where_the_model_has_more() -> None:
    assert "--context-length" not in _options({}, _plan(model_context_tokens=512))
    assert "--disable-radix-cache" in _options({}, _plan(radix_cache=False))


def test_the_users_arguments_win_over_ours() -> None:
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
        ({"urls": ("http://a:1", "http://a:1")}, r"rollout.sglang.urls: expected different servers"),
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
    ],
)
def test_options_that_contradict_each_other_are_refused(sglang: dict[str, Any], message: str) -> None:
    rollout = RolloutConfig(engine="sglang", num_workers=2, sglang=SGLangConfig(**sglang))
    with pytest.raises(ConfigError, match=message):
        validate(Config(rollout=rollout))


def test_tensor_parallel_is_for_sglang_alone() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel: expected 1 with rollout.engine=embedded, got 2"):
        validate(Config(rollout=RolloutConfig(tensor_parallel=2)))
    validate(Config(rollout=RolloutConfig(tensor_parallel=2, engine="sglang")))


def test_weights_are_written_for_their_owner_alone_and_removed_after_a_crash(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_rloo.engines.sglang.model_folder._MEMORY", tmp_path)
    abandoned = tmp_path / "areal_rloo-weights-of-the-dead"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    facts = read_model(tiny_folders["qwen2"])
    folder = WeightsFolder(facts)
    assert not abandoned.exists()
    other = WeightsFolder(facts)
    weights = {name: torch.zeros(shape) for name, shape in facts.shapes.items()}
    written = folder.write(1, weights.items())
    assert written.is_relative_to(tmp_path), "the one of a living process was left alone"
    assert written.stat().st_mode & 0o077 == 0
    folder.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_the_models_files_say_what_weights_must_look_like(tiny_folders: dict[str, Path]) -> None:
    facts = read_model(tiny_folders["qwen2"])
    config = json.loads((tiny_folders["qwen2"] / "config.json").read_text())
    assert facts.vocab_size == config["vocab_size"]
    assert facts.shapes["model.norm.weight"] == (64,)
