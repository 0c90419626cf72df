"""Test low-rank adapters: what is trained, the weights for engines (adapters apart, or merged), and the exports."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.checkpoints import checkpoint_state
from support.requests_to_serve import learner_logprobs, mixed_requests, request, results, serving
from support.train_steps import ragged_groups, step_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from areal_rloo.config import LoraConfig, load_config
from areal_rloo.engines.base import UNKNOWN
from areal_rloo.errors import EngineError, ModelError
from areal_rloo.learner import adapters
from areal_rloo.learner.adapters import lost_share, merge, named_weights, rounding, write_adapters
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.resuming import check_model
from areal_rloo.learner.team import Team
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.models.stored import merged, stored_parameters
from areal_rloo.weights.manifest import empty_buckets, views

pytest.importorskip("peft", reason="the extra peft is not installed")

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8)


def _team(folder: Path, *overrides: str) -> Team:
    torch.manual_seed(0)
    config = load_config("quickstart.yaml", ["learner.lora={rank: 4, alpha: 8}", *overrides])
    return Team(build_rank(config, model_path=str(folder), device=CPU))


def _changed(team: Team, size: float) -> Team:
    """Draw adapters that change the weights by about this size."""
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in team.own.policy.causal.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=1.0 if "lora_A" in key else size)
    return team


def _published(team: Team) -> dict[str, torch.Tensor]:
    """Return the weights as the engine gets them."""
    buckets = empty_buckets(team.own.manifest, CPU)
    team.gather_weights(buckets)
    return dict(views(team.own.manifest, buckets))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_new_adapters_change_no_weight_and_no_name(tiny_folders: dict[str, Path], name: str) -> None:
    original = dict(AutoModelForCausalLM.from_pretrained(tiny_folders[name], dtype=torch.float32).named_parameters())
    weights = _team(tiny_folders[name]).whole_weights()
    merge(weights)
    assert list(weights) == list(original)
    assert all(torch.equal(weights[key], original[key].detach()) for key in original)


def test_only_adapters_are_trained(tiny_folders: dict[str, Path]) -> None:
    rank = _team(tiny_folders["qwen2"], "learner.lora.targets=[q_proj, v_proj]").own
    trained = [name for name, parameter in rank.policy.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * rank.policy.causal.config.num_hidden_layers
    assert all("lora_" in name for name in trained)
    assert sum(len(group["params"]) for group in rank.optimizer.param_groups) == len(trained)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_merged_weights_equal_the_model_with_adapters(tiny_folders: dict[str, Path], name: str) -> None:
    """Compare names, values (biases included) and the logits of a text."""
    causal = _changed(_team(tiny_folders[name]), 0.1).own.policy.causal
    plain = AutoModelForCausalLM.from_pretrained(tiny_folders[name], dtype=torch.float32)
    before = plain.state_dict()
    missing, unexpected = plain.load_state_dict(dict(named_weights(causal)), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert unexpected == []
    assert not torch.equal(plain.state_dict()["model.layers.0.mlp.up_proj.weight"], before["lm_head.weight"])
    causal.set_attn_implementation("sdpa")
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(plain(ids).logits, causal(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_embedded_engine_gets_the_adapters_alone(tiny_folders: dict[str, Path]) -> None:
    team = _changed(_team(tiny_folders["qwen2"]), 0.05)
    published, whole = _published(team), team.whole_weights()
    merge(whole)
    assert published
    assert not published.keys() & whole.keys()
    assert team.own.manifest.total_bytes < 0.2 * team.own.apart_manifest.total_bytes
    with (
        serving(tiny_folders["qwen2"], lora=LORA) as engine,
        pytest.raises(EngineError, match=r"unknown .*embed_tokens"),
    ):
        engine.load_weights(1, [*published.items(), *whole.items()]).result(timeout=60)


@pytest.mark.parametrize(
    ("overrides", "needs_model"),
    [
        (("learner.lora={}",), True),
        (("learner.lora={publish: merged}",), False),
        (("learner.lora={}", "rollout.engine=sglang"), False),
        (("learner.lora={publish: adapters}", "rollout.engine=sglang"), True),
        ((), False),
        (("algorithm.kl.coefficient=0.1",), True),
        (("algorithm.kl.coefficient=0.1", "model.reference.refresh_every_n_versions=5"), False),
        (("algorithm.kl.coefficient=0.1", "model.reference.path=another"), False),
    ],
)
def test_a_resume_needs_the_first_model_where_its_files_count(
    overrides: tuple[str, ...], needs_model: bool, tmp_path: Path
) -> None:
    """A checkpoint has the frozen weights, too, so the learner would differ from engines with other files."""
    config, state = step_config(*overrides), checkpoint_state(1)
    check_model(state, config, tmp_path, state.base)
    if needs_model:
        with pytest.raises(ModelError, match=rf"model\.path: {tmp_path} .* \(digest {state.base}, got 0123 "):
            check_model(state, config, tmp_path, "0123")
    else:
        check_model(state, config, tmp_path, "0123")


def test_no_token_comes_before_the_first_adapters(tiny_folders: dict[str, Path]) -> None:
    """They come with the digest of the learner's model, so a worker with another model generates nothing."""
    team = _changed(_team(tiny_folders["qwen2"]), 0.05)
    with serving(tiny_folders["qwen2"], lora=LORA, policy_version=UNKNOWN) as engine:
        (waiting,) = engine.submit([request("waits", min_version=0)])
        engine.load_weights(0, _published(team).items()).result(timeout=60)
        assert waiting.result(timeout=60).versions.tolist()[:1] == [0]


def test_unknown_target_layers_are_refused_with_the_known_names(tiny_folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="got lm_head"):  # the head weight is used directly
        _team(tiny_folders["qwen2"], "learner.lora.targets=[q_proj, lm_head]")
    with pytest.raises(ModelError, match=r"learner.lora.targets: expected names .*q_proj.*, got query_key_value"):
        _team(tiny_folders["qwen2"], "learner.lora.targets=[query_key_value]")


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("targets", [None, ("k_proj", "v_proj", "up_proj", "down_proj")])
def test_the_embedded_engine_serves_adapters_apart(
    tiny_folders: dict[str, Path], name: str, targets: tuple[str, ...] | None
) -> None:
    """Compare with the learner's logprobs in float32, also of a pinned request, which gets a copy of the weights."""
    team = _changed(
        _team(tiny_folders[name], f"learner.lora.targets={'null' if targets is None else list(targets)}"), 0.05
    )
    requests = [*mixed_requests(8), request("pinned", pinned=True)]
    with serving(tiny_folders[name], lora=msgspec.structs.replace(LORA, targets=targets)) as engine:
        before = results(engine.submit(requests[:8]))
        engine.load_weights(1, _published(team).items()).result(timeout=60)
        completions = results(engine.submit(requests))
    expected = learner_logprobs(team.own.policy.causal, requests, completions)
    for completion, logprobs in zip(completions, expected, strict=True):
        np.testing.assert_allclose(completion.behaviour_logprobs, logprobs, rtol=0, atol=1e-4)
    assert any(one.tokens.tolist() != other.tokens.tolist() for one, other in zip(before, completions, strict=False))


@pytest.fixture
def rounded_folder(tiny_folders: dict[str, Path], tmp_path: Path) -> Path:
    """A model whose weights are bfloat16 numbers, as those of most models are: nothing below half a step moves them."""
    AutoModelForCausalLM.from_pretrained(tiny_folders["qwen2"], dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    return tmp_path / "bf16"


def test_adapters_apart_lower_the_mismatch_of_a_bfloat16_engine(rounded_folder: Path) -> None:
    """Compare the learner's logprobs, in bfloat16 too, with those of an engine with adapters apart, or merged."""
    causal, requests = _changed(_team(rounded_folder), 2e-4).own.policy.causal, mixed_requests(64, longest=100)
    mismatch = {}
    for apart in (True, False):
        with serving(rounded_folder, dtype=torch.bfloat16, lora=LORA if apart else None) as engine:
            engine.load_weights(1, list(named_weights(causal, "adapters" if apart else "merged"))).result(timeout=60)
            completions = results(engine.submit(requests))
        expected = np.concatenate(learner_logprobs(causal, requests, completions, torch.bfloat16))
        found = np.concatenate([completion.behaviour_logprobs for completion in completions])
        mismatch[apart] = float(np.abs(found - expected).mean())
    assert mismatch[True] < 0.8 * mismatch[False]


def test_a_refreshed_reference_has_the_adapters_apart(rounded_folder: Path) -> None:
    """In bfloat16, merged weights would differ from the policy: a divergence that the policy does not have."""
    refreshed = ("algorithm.kl.coefficient=0.1", "model.reference.refresh_every_n_versions=2")
    own = _changed(_team(rounded_folder, "model.dtype=bfloat16", *refreshed), 1e-3).own
    requests = mixed_requests(8)
    with serving(rounded_folder) as engine:
        completions = results(engine.submit(requests))

    def difference() -> float:
        assert own.reference is not None
        models = (own.policy.causal, own.reference.policy.causal)
        both = (learner_logprobs(model, requests, completions, torch.bfloat16) for model in models)
        return max(float(np.abs(one - other).max()) for one, other in zip(*both, strict=True))

    before = difference()
    own.refresh_reference()
    assert before > 0.01
    assert difference() == 0


def test_an_engine_without_the_adapters_refuses_them(tiny_folders: dict[str, Path]) -> None:
    team = _team(tiny_folders["qwen2"])
    with serving(tiny_folders["qwen2"]) as engine, pytest.raises(EngineError, match=r"unknown .*lora_A"):
        engine.load_weights(1, _published(team).items()).result(timeout=60)


def test_an_sglang_server_gets_merged_weights(tiny_folders: dict[str, Path]) -> None:
    team = _changed(_team(tiny_folders["qwen2"], "rollout.engine=sglang", "model.dtype=float32"), 0.1)
    published, apart = _published(team), team.whole_weights()
    merge(apart)
    assert published.keys() == apart.keys()
    for name, weight in apart.items():
        torch.testing.assert_close(published[name], weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_merges_adapters_as_the_learner_does(rounded_folder: Path, dtype: str) -> None:
    sglang = ("rollout.engine=sglang", f"model.dtype={dtype}", "learner.lora.publish=adapters")
    team = _changed(_team(rounded_folder, *sglang), 0.1)
    stored = stored_parameters("model.path", rounded_folder)
    got = dict(merged(stored, _published(team), getattr(torch, dtype)))
    expected = _published(_changed(_team(rounded_folder, *sglang[:2]), 0.1))
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        assert got[name].dtype == weight.dtype
        torch.testing.assert_close(got[name], weight, rtol=2**-8 if dtype == "bfloat16" else 1e-5, atol=1e-6)
    with pytest.raises(EngineError, match="adapters do not fit the model: unknown"):
        dict(merged({"lm_head.weight": stored["model.embed_tokens.weight"]}, _published(team), torch.float32))


@pytest.mark.parametrize(("size", "least", "most"), [(1e-7, 0.9, 1.0), (1e-5, 0.1, 0.9), (1e-1, -0.01, 0.01)])
def test_the_lost_share_is_that_of_the_rounded_weights(
    rounded_folder: Path, size: float, least: float, most: float
) -> None:
    """Compare with the change that the published weights have, along the change of the adapters."""
    team = _changed(_team(rounded_folder, "rollout.engine=sglang", "model.dtype=bfloat16"), size)
    causal = team.own.policy.causal
    share = lost_share([rounding(causal, torch.bfloat16)])
    before = AutoModelForCausalLM.from_pretrained(rounded_folder, dtype=torch.float32).state_dict()
    made = kept = 0.0
    published = _published(team)
    for name, weight in named_weights(causal):
        exact = (weight - before[name]).double()
        made += float((exact * exact).sum())
        kept += float((exact * (published[name].double() - before[name].bfloat16().double())).sum())
    assert share == pytest.approx(1 - kept / made, abs=1e-9)
    assert least < share < most


class _Widest(TorchDispatchMode):
    """Records the most numbers of a float64 tensor that an operation returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if isinstance(given, torch.Tensor) and given.dtype == torch.float64:
            self.most = max(self.most, given.numel())
        return given


def test_the_lost_share_needs_little_memory(rounded_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of whole matrices in float64 would need 2.3 GB for a matrix of a model with 7e9 parameters."""
    monkeypatch.setattr(adapters, "_ROWS", 4, raising=False)
    causal = _changed(_team(rounded_folder), 1e-3).own.policy.causal
    with _Widest() as widest:
        rounding(causal, torch.bfloat16)
    assert 0 < widest.most <= 4 * max(weight.shape[-1] for _, weight in named_weights(causal))


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_measuring_the_lost_share_is_no_exchange(tiny_folders: dict[str, Path], engine: str) -> None:
    config = step_config("learner.lora={rank: 4}", f"rollout.engine={engine}", "rollout.device=cpu")
    team = Team(build_rank(config, model_path=str(tiny_folders["qwen2"]), device=CPU))
    times = TrainStep(team, config).step(ragged_groups(), policy_version=2).measured["times_s"]
    assert ("rounding" in times) == (engine == "sglang")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft and newer transformers
def test_peft_loads_the_exported_adapters(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    import peft

    team = _changed(_team(tiny_folders["qwen2"], "learner.lora.targets=[q_proj, up_proj]"), 0.1)
    lora = msgspec.structs.replace(LORA, targets=("q_proj", "up_proj"))
    write_adapters(tmp_path, merge(team.whole_weights()), lora, base="name/of-model")
    base = AutoModelForCausalLM.from_pretrained(tiny_folders["qwen2"], dtype=torch.float32)
    loaded: Any = peft.PeftModel.from_pretrained(base, str(tmp_path))
    assert loaded.active_peft_config.base_model_name_or_path == "name/of-model"
    ids = torch.arange(3, 40)[None]
    causal = team.own.policy.causal
    causal.set_attn_implementation("sdpa")
    torch.testing.assert_close(loaded(ids).logits, causal(ids).logits, rtol=1e-4, atol=1e-4)
