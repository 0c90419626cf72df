"""Every family that the engine serves has the logprobs of transformers, and needs each of its switches."""

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.families import FAMILIES as TINY
from support.families import VOCAB_SIZE, family_config, family_model, save_family
from support.model_versions import cached_logprobs, model_of
from support.requests_to_serve import mixed_requests, request, results, serving, wait_until
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from areal_rloo.config import EmbeddedConfig, LoraConfig
from areal_rloo.engines.base import GenerationRequest
from areal_rloo.engines.embedded.families import FAMILIES, Architecture, Norms
from areal_rloo.errors import EngineError, ModelError
from areal_rloo.models.folder import ADAPTER_DOWN, ADAPTER_UP
from areal_rloo.models.sizes import Sizes
from areal_rloo.trajectory import Completion

SERVED = [name for name, options in TINY.items() if options["model_type"] in FAMILIES]
Versions = PreTrainedModel | dict[int, PreTrainedModel]
FUSED = ["phi3", "glm", "glm4"]
LONG = tuple(np.random.default_rng(2).integers(2, VOCAB_SIZE, 700).tolist())


def _served(folder: Path, requests: list[GenerationRequest], **options: object) -> list[Completion]:
    with serving(folder, **options) as engine:
        return results(engine.submit(requests))


def _error(model: Versions, requests: list[GenerationRequest], completions: list[Completion]) -> float:
    """Return the largest difference of the completions' logprobs from those of a transformers model, or of versions."""
    models = dict.fromkeys((0, 1), model) if isinstance(model, PreTrainedModel) else model
    differences = [
        completion.behaviour_logprobs
        - cached_logprobs(models, one.prompt_tokens, completion, temperature=one.sampling.temperature).numpy()
        for one, completion in zip(requests, completions, strict=True)
    ]
    return float(np.abs(np.concatenate(differences)).max())


def _requests(num: int = 7) -> list[GenerationRequest]:
    return mixed_requests(num, vocab_size=VOCAB_SIZE, longest=40, temperature=0.9)


def test_every_family_of_the_engine_has_a_tiny_model() -> None:
    assert {TINY[name]["model_type"] for name in SERVED} == set(FAMILIES)


@pytest.mark.parametrize("name", SERVED)
def test_logprobs_of_a_family_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tied = not family_config(name).tie_word_embeddings  # the tests below have the default
    model, requests = save_family(name, tmp_path, tie_word_embeddings=tied), _requests()
    assert _error(model, requests, _served(tmp_path, requests)) < 2e-5


@pytest.mark.parametrize("name", SERVED)
def test_long_prompts_of_a_family_are_right_whole_and_in_chunks(name: str, tmp_path: Path) -> None:
    """Prefill a prompt whole, then beside other requests in chunks, and prompts that begin with the same tokens."""
    model, prompt = save_family(name, tmp_path), LONG if name == "gemma2" else LONG[:300]
    requests = [request("whole", prompt=prompt, max_new_tokens=20), request("beside", max_new_tokens=60)]
    requests += [request(str(end), prompt=(*prompt[:end], 7, 8), max_new_tokens=20) for end in (290, 137)]
    requests.append(request("other", prompt=LONG[300:500], max_new_tokens=20))
    options = {"context_tokens": 1024, "options": EmbeddedConfig(prefill_chunk_tokens=50, cache_tokens=4096)}
    with serving(tmp_path, **options) as engine:
        completions = results(engine.submit(requests[:1]))
        futures = engine.submit(requests[1:2])
        wait_until(lambda: engine.statistics().decode_steps > 20)
        completions += results([*futures, *engine.submit(requests[2:])])
        assert engine.statistics().cached_tokens > 0
    assert _error(model, requests, completions) < 5e-5


@pytest.mark.parametrize("name", SERVED)
def test_completions_of_a_family_continue_over_an_update(name: str, tmp_path: Path) -> None:
    versions = {0: save_family(name, tmp_path), 1: model_of(tmp_path, factor=1.03)}
    requests = [request(str(i), prompt=LONG[i:][:20], max_new_tokens=100, seed=i) for i in range(3)]
    with serving(tmp_path) as engine:
        futures = engine.submit(requests)
        wait_until(lambda: engine.statistics().decode_steps > 10)
        engine.load_weights(1, versions[1].named_parameters()).result(timeout=60)
        completions = results(futures)
    assert all(set(completion.versions.tolist()) == {0, 1} for completion in completions)
    assert _error(versions, requests, completions) < 5e-5
    assert _error(versions[0], requests, completions) > 1e-2


@pytest.mark.parametrize("name", SERVED)
def test_preempted_completions_of_a_family_are_computed_again(name: str, tmp_path: Path) -> None:
    model = save_family(name, tmp_path)
    requests = [request(str(i), prompt=LONG[i:][:40], max_new_tokens=120, seed=i) for i in range(3)]
    options = {"context_tokens": 256, "options": EmbeddedConfig(cache_tokens=512, prefill_chunk_tokens=64)}
    with serving(tmp_path, **options) as engine:
        completions = results(engine.submit(requests))
        assert engine.statistics().num_preempted > 0
    assert _error(model, requests, completions) < 5e-5


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "phi3", "olmo2", "granite", "glm4"])
def test_bfloat16_errors_of_a_family_are_those_of_autocast(name: str, tmp_path: Path) -> None:
    """Compare with float32; the error is no larger than that of transformers under autocast, as in a learner."""
    model, requests = save_family(name, tmp_path), _requests(9)
    completions = _served(tmp_path, requests, dtype=torch.bfloat16)
    engine, autocast = [], []
    for one, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([[*one.prompt_tokens, *completion.tokens.tolist()]])
        chosen = ids[0, len(one.prompt_tokens) :, None]
        logprobs = []
        for enabled in (False, True):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                logits = model(ids).logits[0, len(one.prompt_tokens) - 1 : -1].float() / one.sampling.temperature
            logprobs.append(logits.log_softmax(-1).gather(-1, chosen).squeeze(-1).numpy())
        engine.append(completion.behaviour_logprobs - logprobs[0])
        autocast.append(logprobs[1] - logprobs[0])
    assert np.abs(np.concatenate(engine)).mean() < 1.25 * np.abs(np.concatenate(autocast)).mean()


SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("name", ["gemma3_text", "glm4"])
def test_scaled_rotary_positions_of_a_family_are_served(name: str, kind: str, tmp_path: Path) -> None:
    """By type of layer, and of half of a head in every layer."""
    rotary = family_config(name).rope_parameters
    scaled = {"rope_theta": 1000.0} | SCALED[kind]
    if "full_attention" in rotary:
        scaled = rotary | {"full_attention": scaled}
    elif "partial_rotary_factor" in rotary:
        scaled["partial_rotary_factor"] = rotary["partial_rotary_factor"]
    model, requests = save_family(name, tmp_path, rope_parameters=scaled), _requests()
    assert _error(model, requests, _served(tmp_path, requests)) < 5e-5
    assert _error(family_model(name), requests, _served(tmp_path, requests)) > 1e-2, "the angles differ"


OPTIONS = {
    "qwen3": {"attention_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "granite": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "smollm3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "mlp_bias": True},
    "mistral": {"sliding_window": None, "head_dim": 24},
    "phi3": {"num_key_value_heads": 4, "sliding_window": None},
    "gemma2": {"attention_bias": True, "attn_logit_softcapping": None, "num_key_value_heads": 4},
    "gemma3_text": {"attention_bias": True, "final_logit_softcapping": 2.0},
    "olmo2": {"attention_bias": True, "num_key_value_heads": 1},
    "glm4": {"attention_bias": False, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_of_a_family_are_served(name: str, tmp_path: Path) -> None:
    model, requests = save_family(name, tmp_path, **OPTIONS[name]), _requests()
    assert _error(model, requests, _served(tmp_path, requests)) < 5e-5


def _plain(architecture: Architecture) -> dict[str, Any]:
    """Return the switches of a model without peculiarities, of these sizes."""
    sizes = {field.name for field in fields(Sizes)}
    own = [field for field in fields(architecture) if field.name not in sizes]
    given = {field.name: field.default for field in own if field.default is not MISSING}
    return given | {
        "activation": F.silu,
        "attention_scale": architecture.head_dim**-0.5,
        "windows": (None,) * architecture.num_layers,
        "norms": Norms(),
        "rotary": architecture.rotary[-1:] * len(architecture.rotary),
        "rotations": (0,) * architecture.num_layers,
        "rotary_dim": architecture.head_dim,
    }


def _peculiar(name: str) -> list[str]:
    architecture = Architecture.of_config(family_config(name), Path(name))
    return [switch for switch, value in _plain(architecture).items() if getattr(architecture, switch) != value]


def test_the_switches_of_all_families_are_tested() -> None:
    switches = _plain(Architecture.of_config(family_config("llama"), Path("llama")))
    assert {switch for name in SERVED for switch in _peculiar(name)} | {"output_bias", "mlp_bias"} == set(switches)
    assert {"attention_bias", "mlp_bias"} <= OPTIONS["llama"].keys(), "both are options, tested above"


@pytest.mark.parametrize(("name", "switch"), [(name, switch) for name in SERVED for switch in _peculiar(name)])
def test_a_family_without_one_of_its_switches_is_wrong(
    name: str, switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Architecture.of_config

    def mutated(config: PretrainedConfig, path: Path) -> Architecture:
        architecture = read(config, path)
        return replace(architecture, **{switch: _plain(architecture)[switch]})

    model, requests = save_family(name, tmp_path), _requests()
    monkeypatch.setattr(Architecture, "of_config", mutated)
    try:
        completions = _served(tmp_path, requests)
    except ModelError as error:
        assert "cannot load" in str(error), "the checkpoint has other tensors"
    else:
        assert _error(model, requests, completions) > 1e-2


@pytest.mark.parametrize("name", SERVED)
def test_adapters_of_a_family_are_served_apart(name: str, tmp_path: Path) -> None:
    """Compare with a model whose weights have the adapters merged in."""
    model, requests = save_family(name, tmp_path), _requests()
    layers = [key.removesuffix(".weight") for key, _ in model.named_parameters() if key.endswith("proj.weight")]
    weights = {}
    targets = tuple({layer.rpartition(".")[2] for layer in layers})
    torch.manual_seed(1)
    for layer in layers:
        weight = model.get_parameter(f"{layer}.weight")
        down, up = torch.randn(2, weight.shape[1]), 0.05 * torch.randn(weight.shape[0], 2)
        weights |= {layer + ADAPTER_DOWN: down, layer + ADAPTER_UP: up}
        weight.data += up @ down
    with serving(tmp_path, lora=LoraConfig(rank=2, alpha=2, targets=targets)) as engine:
        before = results(engine.submit(requests))
        engine.load_weights(1, weights.items()).result(timeout=60)
        completions = results(engine.submit([*requests, request("pinned", pinned=True)]))
    assert _error(model, [*requests, request("pinned")], completions) < 5e-5
    assert _error(model, requests, before) > 1e-2, "the adapters have an effect"


@pytest.mark.parametrize("name", FUSED)
def test_an_update_with_a_wrong_fused_tensor_copies_nothing(name: str, tmp_path: Path) -> None:
    model, requests = save_family(name, tmp_path), _requests()
    weights = {key: weight.detach() * 1.1 for key, weight in model.named_parameters()}
    fused = next(key for key in reversed(weights) if key.endswith(("qkv_proj.weight", "gate_up_proj.weight")))
    with serving(tmp_path) as engine:
        update = engine.load_weights(1, (weights | {fused: weights[fused][1:]}).items())
        with pytest.raises(EngineError, match=f"{fused}: expected shape"):
            update.result(timeout=60)
        split = {fused.replace("gate_up_proj", "gate_proj"): weights[fused]}
        update = engine.load_weights(1, (split | {k: v for k, v in weights.items() if k != fused}).items())
        with pytest.raises(EngineError, match="weights do not fit the model: unknown"):
            update.result(timeout=60)
        completions = results(engine.submit(requests))
    assert _error(model, requests, completions) < 2e-5


@pytest.mark.parametrize("name", ["phi3", "gemma2"])
def test_a_bfloat16_checkpoint_of_a_family_is_read(name: str, tmp_path: Path) -> None:
    family_model(name).to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    requests = _requests()
    assert _error(model, requests, _served(tmp_path, requests)) < 2e-5


OTHERS = r"a server for rollout\.engine \(sglang, vllm\)"  # where a server may serve the model
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    f"is a cohere2 model.*expected one of qwen2, qwen3, llama, mistral.*{OTHERS}": ("cohere2", {}),
    f"is a starcoder2 model.*{OTHERS}": ("starcoder2", {}),
    "is a stablelm model.*no test shows that the learner trains it": ("stablelm", {}),
    f"is a cohere2 model.*{OTHERS}": ("cohere2", {}),
    f"has activation gelu; expected silu or gelu_pytorch_tanh.*{OTHERS}": ("mistral", {"hidden_act": "gelu"}),
    "has use_bidirectional_attention; expected causal": ("gemma3_text", {"use_bidirectional_attention": True}),
    f"has layers of type chunked_attention.*{OTHERS}": ("smollm3", {"layer_types": ["chunked_attention"] * 4}),
    "has rotary positions of type longrope .*depend on the length": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
    ),
    "has rotary positions of type dynamic ": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}}},
    ),
    "rotates 7 numbers of a head": ("glm", {"rope_parameters": {"partial_rotary_factor": 0.45}}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_model_that_the_engine_cannot_serve_is_refused(words: str, tmp_path: Path) -> None:
    name, options = REFUSED[words]
    with pytest.raises(ModelError, match=rf"model\.path: llm {words}"):
        Architecture.of_config(family_config(name, **options), Path("llm"))
