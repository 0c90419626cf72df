"""Answers of servers with every field that is read, and their readers, which check what they accept."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from areal_rloo.engines.server.answers import Output
from areal_rloo.engines.server.client import fields_of
from areal_rloo.engines.server.readback import difference_of
from areal_rloo.engines.sglang import capabilities as sglang_capabilities
from areal_rloo.engines.sglang import completions as sglang_completions
from areal_rloo.engines.sglang import readback as sglang_readback
from areal_rloo.engines.vllm import capabilities as vllm_capabilities
from areal_rloo.engines.vllm import completions as vllm_completions
from areal_rloo.models.fingerprint import Fingerprint, Sample
from areal_rloo.wire.token_rules import broken_by_logprobs, check_version_runs

VOCAB_SIZE = 100
_HIGHEST_INT32 = 2**31 - 1
_SPANS = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
_NAME = "model.norm.weight"
_SAMPLE = Sample("sha256", (Fingerprint((_NAME,), (1,)),))
_SCHEMAS = {
    "Body": {"properties": {"rid": {}, "extra_key": {}}},
    "Other": {"$ref": "#/components/schemas/Body"},
}


def _path(schema: str) -> dict[str, Any]:
    body = {"schema": {"anyOf": [{"$ref": f"#/components/schemas/{schema}"}, {"type": "null"}]}}
    return {"post": {"requestBody": {"content": {"application/json": body}}}}


ANSWERS: dict[str, dict[str, Any]] = {
    "completion of SGLang": {
        "text": "a b c",
        "output_ids": [5, 6, 7],
        "meta_info": {
            "id": "0",
            "output_token_logprobs": [[-1.0, 5, None], [-2.5, 6, None], [0, 7, "c"]],
            "finish_reason": {"type": "stop", "matched": 7},
            "weight_versions": _SPANS,
            "cached_tokens": 3,
            "num_retractions": 0,
        },
    },
    "completion of vLLM": {
        "choices": [
            {
                "token_ids": [5, 6, 7],
                "logprobs": {"content": [{"logprob": -1.0, "token_id": token} for token in (5, 6, 7)]},
                "finish_reason": "stop",
                "weight_versions": _SPANS,
            }
        ],
        "usage": {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}},
    },
    "features of SGLang": {
        "openapi": {
            "paths": {path: _path("Other") for path in [*sglang_capabilities.NEEDED, "/weights_checker"]},
            "components": {"schemas": _SCHEMAS},
        },
        "server_info": {
            "version": "0.5.23",
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "max_req_input_len": 1018,
            "max_total_num_tokens": 8000,
            "disable_radix_cache": False,
            "device": "cpu",
        },
        "models": {"data": [{"max_model_len": 1024}]},
        "probe": {"meta_info": {"weight_versions": []}},
    },
    "features of vLLM": {
        "ranks": [
            {
                "protocol": 1,
                "tensor_parallel": 1,
                "data_parallel": 1,
                "pipeline_parallel": 1,
                "quantization": None,
                "logprobs": "processed_logprobs",
            }
        ],
        "models": {"data": [{"max_model_len": 1024}]},
        "probe": {"choices": [{"weight_versions": [{"version": "0", "start": 0, "end": 1}]}]},
    },
    "digests of SGLang": {
        "ranks": [{"checksums": {_NAME: "0000000000000001"}, "parallelism_info": [{"tp_rank": 0}]}],
    },
    "digests of vLLM": {"results": [{_NAME: "0000000000000001"}]},
}


def _check(output: Output) -> None:
    """Check that the learner accepts the output, and that the arrays of a completion hold the numbers."""
    tokens = np.asarray(output.tokens, dtype=np.int32)
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    assert len(tokens) == len(output.logprobs) == len(output.versions)
    assert broken_by_logprobs(np.asarray(output.logprobs, dtype=np.float32)) is None
    versions, counts = np.unique(np.asarray(output.versions, dtype=np.int32), return_counts=True)
    check_version_runs(list(zip(versions.tolist(), counts.tolist(), strict=True)), len(tokens))
    assert list(output.versions) == sorted(output.versions)
    for count in (output.cached_tokens, output.preempted):
        assert type(count) is int
        assert 0 <= count <= _HIGHEST_INT32


def _read_sglang_completion(answer: dict[str, Any]) -> None:
    for late in (False, True):
        _check(
            sglang_completions.read_output(answer, sent_version=1, spans=True, late_tokens=late, vocab_size=VOCAB_SIZE)
        )


def _read_vllm_completion(answer: dict[str, Any]) -> None:
    _check(vllm_completions.read_output(answer, sent_version=1, spans=True, vocab_size=VOCAB_SIZE))


def _objects(answer: dict[str, Any], *keys: str) -> Iterator[dict[str, Any]]:
    """Yield the answers of several calls; the client refuses an answer that is no JSON object."""
    return (answer[key] if isinstance(answer.get(key), dict) else {} for key in keys)


def _read_sglang_features(answer: dict[str, Any]) -> None:
    description, info, models, probe = _objects(answer, "openapi", "server_info", "models", "probe")
    assert isinstance(fields_of(description, "/generate"), dict)
    complete = {"paths": {path: _path("Body") for path in sglang_capabilities.NEEDED}, "components": _components()}
    for openapi in (description, complete):
        found = sglang_capabilities.read_capabilities(openapi, info, models, probe=probe)
        sglang_capabilities.check_capabilities(
            found, key="rollout.sglang.urls", tensor_parallel=1, context_tokens=512, pause="in_place"
        )


def _components() -> dict[str, Any]:
    fields = {field: {} for needed in sglang_capabilities.NEEDED.values() for field in needed}
    return {"schemas": {"Body": {"properties": fields}}}


def _read_vllm_features(answer: dict[str, Any]) -> None:
    models, probe = _objects(answer, "models", "probe")
    ranks = answer.get("ranks")
    found = vllm_capabilities.read_capabilities("0.32.0", models, ranks if isinstance(ranks, list) else [], probe=probe)
    vllm_capabilities.check_capabilities(found, key="rollout.vllm.urls", tensor_parallel=1, context_tokens=512)


def _read_sglang_digests(answer: dict[str, Any]) -> None:
    difference = sglang_readback.difference_in(answer, _SAMPLE)
    assert difference is None or len(difference) < 1000


def _read_vllm_digests(answer: dict[str, Any]) -> None:
    difference = difference_of(_SAMPLE, answer.get("results"))
    assert difference is None or len(difference) < 1000


READERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "completion of SGLang": _read_sglang_completion,
    "completion of vLLM": _read_vllm_completion,
    "features of SGLang": _read_sglang_features,
    "features of vLLM": _read_vllm_features,
    "digests of SGLang": _read_sglang_digests,
    "digests of vLLM": _read_vllm_digests,
}
"""For each answer, a function that refuses an odd answer with an EngineError or a ConfigError, and nothing else."""
