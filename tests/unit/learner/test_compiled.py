"""Test compiled layers against eager layers, for rows of many shapes without recompilation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.ranks_to_run import COMPILERS, compiling_with

from areal_rloo.config import load_config
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.packing import Row, pack
from areal_rloo.models.policy import TokenLogprobs
from areal_rloo.trajectory import Completion, Trajectory

CPU = torch.device("cpu")


def _trajectories(lengths: list[int]) -> list[Trajectory]:
    rng = np.random.default_rng(sum(lengths))
    made = []
    for index, num in enumerate(lengths):
        tokens = rng.integers(2, 200, num).astype(np.int32)
        completion = Completion(tokens, np.zeros(num, np.float32), np.zeros(num, np.int32), "stop")
        made.append(Trajectory(0, index, np.array([3, 4], np.int32), completion, 0.0))
    return made


def _sum(given: TokenLogprobs, part: slice) -> torch.Tensor:
    return given.logprobs.sum()


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.filterwarnings("ignore")  # warnings of torch about the compiler
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_layers_give_loss_and_gradient_of_eager_layers(tiny_folders: dict[str, Path], compiler: str) -> None:
    """Gradient checkpointing computes the compiled layers twice."""
    torch.compiler.reset()
    folder = str(tiny_folders["qwen2"])
    with compiling_with(compiler):
        eager, compiled = (
            build_rank(load_config("quickstart.yaml", more), model_path=folder, device=CPU).policy
            for more in ((), ("learner.compile=true", "learner.gradient_checkpointing=true"))
        )
    for lengths in ([9, 30, 4], [50], [7] * 12, [3, 100, 41, 12]):
        ((microbatch,),) = pack(_trajectories(lengths), max_tokens=4096).microbatches
        row = Row.of(microbatch, CPU)
        losses = []
        for policy in (eager, compiled):
            policy.zero_grad()
            loss, *_ = policy(row.input_ids, row.layout, row.predicts, row.targets, token_loss=_sum)
            loss.backward()
            losses.append(float(loss.detach()))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        pairs = zip(eager.named_parameters(), compiled.parameters(), strict=True)
        for (name, parameter), theirs in pairs:
            assert parameter.grad is not None
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(theirs.grad, parameter.grad, rtol=1e-4, atol=1e-5 * scale, msg=name)
