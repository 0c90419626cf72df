"""Test the memory estimate against the tensors torch keeps, and the message when memory runs out."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.live_bytes import LiveBytes
from support.one_rank import one_rank
from support.train_steps import VERSION, long_trajectory, ragged_groups, step_config
from transformers import AutoModelForCausalLM, LlamaConfig

from areal_rloo.config import Config, load_config
from areal_rloo.errors import ModelError, UserError
from areal_rloo.learner import memory
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.costs import OutOfMemoryError, _remedies
from areal_rloo.learner.memory import activation_bytes, estimate
from areal_rloo.learner.packing import Row, pack
from areal_rloo.models import policy
from areal_rloo.models.head import LogitForm
from areal_rloo.models.policy import TokenLogprobs
from areal_rloo.models.sizes import Sizes

CPU = torch.device("cpu")
TESTS = Path(__file__).resolve().parents[2]  # a program that starts there finds support/


def _kept_bytes(folder: Path, config: Config, num_tokens: int) -> int:
    """Count the bytes autograd keeps for the backward pass of a row, each storage once, without weights."""
    policy = build_rank(config, model_path=str(folder), device=CPU).policy
    ((microbatch,),) = pack([long_trajectory(num_tokens + 1)], max_tokens=num_tokens).microbatches
    row = Row.of(microbatch, CPU)
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, int] = {}

    def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def loss(given: TokenLogprobs, part: slice) -> torch.Tensor:
        return given.logprobs.sum()

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        total, *_ = policy(row.input_ids, row.layout, row.predicts, row.targets, token_loss=loss)
    assert total.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen2", "float32"), ("qwen3", "float32"), ("llama", "float32"), ("llama", "bfloat16")]
)
def test_estimated_activations_match_the_tensors_autograd_keeps(
    tiny_folders: dict[str, Path], name: str, dtype: str
) -> None:
    config = load_config("quickstart.yaml", [f"model.dtype={dtype}"])
    few, many = (_kept_bytes(tiny_folders[name], config, num) for num in (512, 1536))
    model = build_rank(config, model_path=str(tiny_folders[name]), device=CPU).policy.causal.config
    sizes = Sizes.of(model.to_dict())
    assert sizes is not None
    assert activation_bytes(sizes, config, on_gpu=False) == pytest.approx((many - few) / 1024, rel=0.25)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("coefficient", [0.0, 0.01])
@pytest.mark.parametrize(("level", "cap"), [("token", None), ("token", 3.0), ("sequence_mean", None)])
def test_the_estimated_logits_match_the_tensors_alive_at_the_same_time(
    dtype: str, coefficient: float, level: str, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (policy, memory):
        monkeypatch.setattr(module, "chunk_logits", lambda *, on_gpu: 2**20)
    loss = f"algorithm.loss={{ratio_level: {level}, entropy_coefficient: {coefficient}}}"
    config = load_config("quickstart.yaml", [f"model.dtype={dtype}", loss])
    model = LlamaConfig(vocab_size=2**14, hidden_size=4, num_attention_heads=1, num_key_value_heads=1)
    hidden = torch.randn(200, 4, dtype=getattr(torch, dtype), requires_grad=True)
    head, targets = torch.randn(2**14, 4, requires_grad=True), torch.randint(0, 2**14, (200,))
    entropy: policy.Entropy = "gradient" if coefficient else "value"

    def sum_of(given: TokenLogprobs, part: slice) -> torch.Tensor:
        return given.logprobs.sum() + coefficient * given.entropy.sum()

    with LiveBytes() as live:
        if config.algorithm.loss.of_tokens:
            policy.loss_of_tokens(hidden, head, targets, LogitForm(cap=cap), sum_of, entropy=entropy)[0].backward()
        else:
            given = policy.chosen_logprobs(hidden, head, targets, LogitForm(cap=cap), entropy=entropy)
            sum_of(given, slice(None)).backward()
    sizes = Sizes.of(model.to_dict() | {"final_logit_softcapping": cap})
    assert sizes is not None
    expected = estimate(replace(sizes, counted=0), config, on_gpu=False, num_trained=0)["logits"]
    assert live.peak == pytest.approx(expected, rel=0.15)


def test_every_memory_saving_option_lowers_the_estimate(tiny_folders: dict[str, Path]) -> None:
    model = build_rank(load_config("quickstart.yaml"), model_path=str(tiny_folders["llama"]), device=CPU)
    sizes = Sizes.of(model.policy.causal.config.to_dict())
    assert sizes is not None
    billion = replace(sizes, counted=10**9)

    def of(*overrides: str) -> float:
        config = load_config("quickstart.yaml", overrides)
        return sum(estimate(billion, config, on_gpu=True, num_trained=10**9).values())

    for override in (
        "learner.microbatch_tokens=1024",
        "learner.gradient_checkpointing=true",
        "learner.num_ranks=2",
        "learner.offload=optimizer",
        "learner.offload=parameters",
        "learner.optimizer.state_dtype=bfloat16",
    ):
        assert of(override) < of(), override
    rows = (
        "learner.microbatch_tokens=4194304"  # for short rows the bfloat16 copy of the weights costs more than is saved
    )
    assert of(rows, "model.dtype=bfloat16") < of(rows)
    assert of("algorithm.kl.coefficient=0.1") > of()
    assert of("algorithm.kl.coefficient=0.1", "model.reference.offload=true") == of()


def test_out_of_memory_names_the_estimate_and_the_remedies(tiny_folders: dict[str, Path]) -> None:
    code = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from areal_rloo.config import load_config\n"
        "from areal_rloo.errors import ModelError, UserError\n"
        "from support.one_rank import one_rank\n"
        "from support.train_steps import long_group\n"
        "torch.set_num_threads(1)\n"
        "config = load_config('quickstart.yaml', ['learner.microbatch_tokens=100000', 'data.max_prompt_tokens=1'])\n"
        "step, groups = one_rank(Path(sys.argv[1]), config), [long_group(20_000)]\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))\n"
        "try:\n    step.step(groups, policy_version=0)\n"
        "except UserError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tiny_folders["llama"])]
    ended = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("out of memory: a step with learner.microbatch_tokens=100000 did not fit; a step ")
    assert "lower learner.microbatch_tokens=100000 (at least 97), set learner.gradient_checkpoint" in ended.stdout


@pytest.mark.parametrize("before", ["nothing", "a step", "a checkpoint"])
def test_only_memory_that_was_never_enough_is_a_users_mistake(
    before: str, tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a step of the run, memory may be missing for other reasons: the launcher restarts the learner."""
    learner = one_rank(tiny_folders["llama"], step_config())
    if before != "nothing":
        learner.step(ragged_groups(0), policy_version=VERSION)
    if before == "a checkpoint":
        learner.team.own.save(tmp_path).result()
        learner = one_rank(tiny_folders["llama"], step_config())
        learner.team.own.load(tmp_path, num_optimizer_steps=1)
    kind = UserError if before == "nothing" else OutOfMemoryError
    monkeypatch.setattr(learner.team.own, "_proximal", _no_memory)
    with pytest.raises(kind, match="out of memory: ") as raised:
        learner.step(ragged_groups(0), policy_version=VERSION)
    assert raised.value.exit_code == (2 if before == "nothing" else 1)
    assert ("state_dtype=bfloat16" in str(raised.value)) == (before == "nothing"), "a checkpoint has the other dtype"


@pytest.mark.parametrize(
    ("state_dtype", "offload"), [("float32", "none"), ("bfloat16", "none"), ("float32", "optimizer")]
)
def test_the_first_train_step_has_the_moments_from_its_beginning(
    state_dtype: str, offload: str, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a config that never fits would fail in the second step, as a crash with restarts."""
    config = step_config(f"learner.optimizer.state_dtype={state_dtype}", f"learner.offload={offload}")
    learner = one_rank(tiny_folders["llama"], config)
    rank = learner.team.own
    monkeypatch.setattr(rank, "_proximal", _no_memory)
    with pytest.raises(UserError):
        learner.step(ragged_groups(0), policy_version=VERSION)
    trained = [parameter for parameter in rank.policy.parameters() if parameter.requires_grad]
    assert all({"exp_avg", "exp_avg_sq"} <= rank.optimizer.state[parameter].keys() for parameter in trained)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.share_devices=in_turns", "rollout.num_slots=1"),
        ("learner.num_ranks=2", "learner.num_replicas=2"),
        ("learner.microbatch_tokens=97", "learner.gradient_checkpointing=true"),
        ("learner.lora={}", "learner.offload=parameters"),
        ("learner.optimizer.betas=[0.9, 0.999]",),
    ],
)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_each_option_named_when_memory_runs_out_is_allowed(overrides: Sequence[str], begun: bool, on_gpu: bool) -> None:
    given = ["data.max_prompt_tokens=1", *overrides]
    words = list(_remedies(step_config(*given), begun=begun, in_step=True, on_gpu=on_gpu))
    assert words or not on_gpu
    assert on_gpu or not any("num_ranks" in remedy for remedy in words), "on a CPU, ranks share the memory"
    for remedy in words:
        lowest = re.search(r"at least (\d+)", remedy)
        options = [option.split("=") for option in re.findall(r"\S+=(?:\[.*?\]|[^\s,]+)", remedy)]
        half = remedy.startswith("lower")
        step_config(*given, *(f"{k}={lowest[1] if lowest else int(v) // 2 if half else v}" for k, v in options))


@pytest.mark.parametrize("resumes", [False, True])
def test_memory_that_the_model_itself_has_not_is_explained(
    resumes: bool, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", _no_memory)
    kind = OutOfMemoryError if resumes else UserError
    with pytest.raises(kind, match=r"out of memory: the model with its optimizer did not fit; a step needs .*; ") as e:
        build_rank(step_config(), model_path=str(tiny_folders["llama"]), device=torch.device("cpu"), resumes=resumes)
    assert not isinstance(e.value, ModelError)


def _no_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "tied", "beside"),
    [
        ((), False, False, 2 * 8 + 4 + 2 * 2),  # gradients in float32, a copy by Gloo, the last gradient, and the sum
        ((), False, True, 4 + 2 * 4),  # weights, and the gradients of embedding and head before they are one
        ((), True, False, 2 * 8 + 4),
        (("model.dtype=bfloat16",), True, False, 2 * 6 + 2),
        (("model.dtype=bfloat16", "learner.num_ranks=8"), True, False, 2 * 6 + 2),
        (("learner.lora={}",), True, False, 0),
    ],
)
def test_gradients_outside_layers_are_whole_until_ranks_sum_them(
    overrides: tuple[str, ...], on_gpu: bool, tied: bool, beside: int
) -> None:
    model = Sizes(151_936, 16_384, 8, 1, 2, 2, 8, tied=tied, gated=True)
    config = load_config("quickstart.yaml", ["learner.num_ranks=2", *overrides])
    parts = estimate(model, config, on_gpu=on_gpu)
    of_a_step = sum(parts.get(name, 0) for name in ("whole layers", "activations", "logits", "gradients to reduce"))
    assert ("gradients to reduce" in parts) == (beside > 0)
    if beside:
        assert of_a_step == pytest.approx(beside * model.head, rel=0.01)
