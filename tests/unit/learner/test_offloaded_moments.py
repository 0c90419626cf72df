"""Test the optimizer step with moments in CPU memory: the same numbers, and the bytes on the GPU as the plan says."""

from typing import Any

import pytest
import torch
from support.live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

from areal_rloo.config import Config, OptimizerConfig, load_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.engine_memory import reserved
from areal_rloo.launcher.fit import resolved
from areal_rloo.launcher.placement import Host
from areal_rloo.learner.memory import GIB, OVERHEAD_BYTES, estimate
from areal_rloo.learner.optimizer import make_optimizer, step_with_states_from
from areal_rloo.models.sizes import SHIPPED, Sizes

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
MODEL = SHIPPED["Qwen/Qwen2.5-1.5B-Instruct"]


def _trained(state_dtype: str, home: torch.device, device: torch.device, num_steps: int) -> list[torch.Tensor]:
    """Return weights and moments after steps; the weight without a gradient has no moments."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in ((9, 7), (7,), (5, 3), (2, 2))]
    settings: Any = {"learning_rate": 0.1, "weight_decay": 0.1, "state_dtype": state_dtype}
    optimizer, schedule = make_optimizer(
        torch.nn.ParameterList(weights), OptimizerConfig(**settings), num_optimizer_steps=num_steps
    )
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for _ in range(num_steps):
        for weight in weights[:-1]:
            weight.grad = torch.randn_like(weight)
        step_with_states_from(optimizer, home, device)
        schedule.step()
    assert [[*map(id, group["params"])] for group in optimizer.param_groups] == [[*map(id, g)] for g in groups]
    moments = [optimizer.state[weight][name] for weight in weights[:-1] for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.device.type for moment in moments} == {home.type}
    assert weights[-1] not in optimizer.state
    return [*weights, *moments]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_steps_by_parameter_equal_whole_steps_to_the_bit(state_dtype: str) -> None:
    whole = _trained(state_dtype, CPU, CPU, 5)
    by_parameter = _trained(state_dtype, torch.device("cpu", 0), CPU, 5)  # not equal to CPU, and the same memory
    for expected, got in zip(whole, by_parameter, strict=True):
        assert torch.equal(expected, got)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_steps_with_moments_from_cpu_memory_equal_steps_on_the_gpu(state_dtype: str) -> None:
    for expected, got in zip(_trained(state_dtype, GPU, GPU, 5), _trained(state_dtype, CPU, GPU, 5), strict=True):
        assert torch.equal(expected.cpu(), got.cpu())


def _step_peak_bytes(config: Config, model: Sizes) -> int:
    """Count the most bytes of weights, gradients, moments and all else on a GPU during two optimizer steps.

    The tensors have sizes and devices, but no numbers, so no GPU and no memory is needed.
    """
    embeddings = [(model.vocab_size, model.hidden_size)] * (1 if model.tied else 2)
    home = CPU if config.learner.offload == "optimizer" else GPU
    with FakeTensorMode(), LiveBytes("cuda") as live:
        shapes = [*embeddings, *[*model.matrices.values()] * model.num_layers]
        weights = [torch.nn.Parameter(torch.empty(shape, device=GPU)) for shape in shapes]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        settings = config.learner.optimizer
        optimizer, _ = make_optimizer(torch.nn.ParameterList(weights), settings, num_optimizer_steps=9)
        for _ in range(2):
            step_with_states_from(optimizer, home, GPU)
        assert sum(weight.numel() for weight in weights) == model.num_parameters
    return live.peak


def _planned(gigabytes: int, *overrides: str, gpus: int = 2) -> Config:
    host = Host("n", "10.0.0.1", 32, tuple(map(str, range(gpus))), 512 * GIB, gigabytes * 10**9)
    return resolved(load_config("gsm8k_rloo.yaml", overrides), [host], MODEL)


@pytest.mark.parametrize(("gpus", "size"), [(1, 32), (2, 24)])  # the learner beside an engine, and alone
def test_the_advice_to_offload_moments_fits_within_the_optimizer_step(gpus: int, size: int) -> None:
    with pytest.raises(PreflightError, match=r"a GPU has 2[29]\..*; .*learner\.offload=optimizer \("):
        _planned(size, gpus=gpus)
    planned = _planned(size, "learner.offload=optimizer", gpus=gpus)
    assert planned.rollout.shares == (gpus == 1)
    engine = reserved(planned, MODEL, size * 10**9, least=True) if planned.rollout.shares else 0
    assert _step_peak_bytes(planned, MODEL) + OVERHEAD_BYTES + engine <= size * 10**9


def test_the_step_has_offloaded_moments_of_a_single_parameter() -> None:
    whole, parted = (_planned(80, f"learner.offload={place}") for place in ("none", "optimizer"))
    less = 8 * (MODEL.num_parameters - MODEL.head)
    assert _step_peak_bytes(whole, MODEL) - _step_peak_bytes(parted, MODEL) == less


def test_a_step_is_counted_if_it_needs_more_than_the_backward_pass() -> None:
    """With a single short row, the moments of the head are more than activations and logits."""
    large = Sizes(2_000_000, 512, 1_024, 2, 8, 8, 64, tied=True, gated=True)
    config = load_config("quickstart.yaml", ["learner.offload=optimizer", "learner.microbatch_tokens=128"])
    parts = estimate(large, config, on_gpu=True)
    assert parts["optimizer step"] > 0
    assert sum(parts.values()) == pytest.approx(_step_peak_bytes(config, large))
    assert "optimizer step" not in estimate(large, load_config("quickstart.yaml"), on_gpu=True)
