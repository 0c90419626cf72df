"""Test options of the learner: low-precision moments, schedules, counted FLOPs, and refused values."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.one_rank import policy_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from areal_rloo.config import OptimizerConfig, load_config
from areal_rloo.errors import ConfigError
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.costs import peak_flops, train_flops
from areal_rloo.learner.optimizer import make_optimizer, schedule_factor, set_schedule
from areal_rloo.learner.packing import Row, pack
from areal_rloo.trajectory import Completion, Trajectory

CPU = torch.device("cpu")


def _after(num_steps: int, config: OptimizerConfig) -> torch.Tensor:
    """Return a weight after steps on noisy gradients of a quadratic."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 8))
    optimizer, schedule = make_optimizer(torch.nn.ParameterList([weight]), config, num_optimizer_steps=num_steps)
    for _ in range(num_steps):
        weight.grad = weight.detach() + 0.1 * torch.randn(weight.shape)
        optimizer.step()
        schedule.step()
    state = optimizer.state[weight]
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {getattr(torch, config.state_dtype)}
    return weight.detach()


def test_bfloat16_moments_give_the_steps_of_float32_moments() -> None:
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1}
    exact = _after(50, OptimizerConfig(**settings))
    rounded = _after(50, OptimizerConfig(**settings, state_dtype="bfloat16"))
    torch.manual_seed(0)
    moved = (exact - torch.randn(64, 8)).abs().max()
    assert float(moved) > 0.3
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.01 * float(moved))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])  # biases and a tied head, norms of queries, neither
def test_weight_decay_shrinks_matrices_alone(tiny_folders: dict[str, Path], name: str, state_dtype: str) -> None:
    """A gradient of 0 leaves only the decay: learning_rate * weight_decay of the weight."""
    for decay_all in (False, True):
        policy = policy_of(tiny_folders[name])
        settings: Any = {"state_dtype": state_dtype, "decay_all": decay_all}
        config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, **settings)
        optimizer, _ = make_optimizer(policy, config, num_optimizer_steps=1)
        before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
        for weight in policy.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        shrunk = {name for name, weight in policy.named_parameters() if not torch.equal(weight, before[name])}
        nonzero = {name for name, weight in before.items() if weight.any()}
        matrices = {name for name in nonzero if name.endswith("_proj.weight") or name.endswith("lm_head.weight")}
        assert shrunk == (nonzero if decay_all else matrices)
        for place, weight in policy.named_parameters():
            torch.testing.assert_close(weight.detach(), before[place] * (0.95 if place in shrunk else 1.0))


def test_schedules_warm_up_and_reach_their_final_rate() -> None:
    for name, middle in (("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)):
        config = OptimizerConfig(schedule=name, warmup_steps=10)
        factors = [schedule_factor(step, config, 110) for step in range(111)]
        assert factors[:10] == pytest.approx([n / 10 for n in range(1, 11)])
        assert factors[60] == pytest.approx(middle)
        assert factors[110] == pytest.approx(1.0 if name == "constant" else 0.0)
        higher = OptimizerConfig(schedule=name, warmup_steps=10, final_share=0.1)
        assert [schedule_factor(step, higher, 110) for step in (9, 60, 110)] == pytest.approx(
            [1.0, 1.0, 1.0] if name == "constant" else [1.0, 0.55, 0.1]
        )


@pytest.mark.parametrize(("share", "num_steps"), [(0.1, 100), (0.0, 0), (0.001, 200), (0.25, 4)])
def test_a_share_of_the_steps_warms_up_as_that_many_steps(share: float, num_steps: int) -> None:
    for name in ("constant", "linear", "cosine"):
        by_share = OptimizerConfig(schedule=name, warmup_share=share)
        by_steps = OptimizerConfig(schedule=name, warmup_steps=math.ceil(share * num_steps))
        factors = [[schedule_factor(step, one, num_steps) for step in range(num_steps)] for one in (by_share, by_steps)]
        assert factors[0] == factors[1]


def test_a_set_schedule_equals_a_stepped_schedule() -> None:
    config = OptimizerConfig(schedule="cosine", warmup_steps=3, learning_rate=1e-3, weight_decay=0.1)
    weights = torch.nn.ParameterList([torch.zeros(1), torch.zeros(2, 2)])  # one group each
    (one, stepped), (other, placed) = (make_optimizer(weights, config, num_optimizer_steps=20) for _ in range(2))
    for _ in range(7):
        one.step()
        stepped.step()
    set_schedule(placed, 7)
    for _ in range(3):
        rates, expected = ([group["lr"] for group in optimizer.param_groups] for optimizer in (other, one))
        assert rates == expected
        assert len(rates) == 2
        assert placed.get_last_lr() == stepped.get_last_lr()
        for optimizer, schedule in ((one, stepped), (other, placed)):
            optimizer.step()
            schedule.step()


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_counted_flops_equal_the_count_of_torch(tiny_folders: dict[str, Path], name: str) -> None:
    lengths, num_targets = [30, 9, 17], [20, 8, 5]
    trajectories = [
        Trajectory(
            0,
            index,
            np.full(length + 1 - num, 3, np.int32),
            Completion(np.full(num, 4, np.int32), np.zeros(num, np.float32), np.zeros(num, np.int32), "stop"),
            0.0,
        )
        for index, (length, num) in enumerate(zip(lengths, num_targets, strict=True))
    ]
    ((microbatch,),) = pack(trajectories, max_tokens=100).microbatches
    row = Row.of(microbatch, CPU)
    with FlopCounterMode(display=False) as counter:
        logprobs, _ = policy_of(tiny_folders[name])(row.input_ids, row.layout, row.predicts, row.targets)
        logprobs.sum().backward()
    counts = {str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()}
    products = sum(count for operation, count in counts.items() if operation in {"aten.mm", "aten.addmm"})
    config = AutoConfig.from_pretrained(tiny_folders[name])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seen = sum(length * (length + 1) // 2 for length in lengths)
    attention = 3 * 4 * config.num_hidden_layers * config.num_attention_heads * head_dim * seen
    assert train_flops(config, lengths, num_targets) - attention == pytest.approx(products, rel=0.01)


def test_peak_flops_are_configured_or_unknown() -> None:
    assert peak_flops(CPU, configured=3e12, dtype="float32") == 3e12
    assert math.isnan(peak_flops(CPU, configured=None, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA T400", math.nan),
    ],
)
def test_peak_flops_are_those_of_the_named_gpu(monkeypatch: pytest.MonkeyPatch, name: str, teraflops: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    flops = peak_flops(torch.device("cuda"), configured=None, dtype="bfloat16")
    assert flops == pytest.approx(1e12 * teraflops, nan_ok=True)


def test_unsupported_options_are_refused_by_name(tiny_folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"learner.num_replicas: expected a divisor of learner.num_ranks=4, got 3"):
        load_config("quickstart.yaml", ["learner.num_ranks=4", "learner.num_replicas=3"])
    with pytest.raises(ConfigError, match=r"learner.optimizer.betas: expected a second beta of at most 0.99"):
        load_config("quickstart.yaml", ["learner.optimizer={state_dtype: bfloat16, betas: [0.9, 0.999]}"])
    config = load_config("quickstart.yaml", ["learner.kernels=liger"])
    with pytest.raises(ConfigError, match=r"learner.kernels: expected torch on a CPU, got liger"):
        build_rank(config, model_path=str(tiny_folders["qwen2"]), device=CPU)
