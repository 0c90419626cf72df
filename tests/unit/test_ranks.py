"""A batch spread over ranks gives the gradient of the same batch on one: real processes, Gloo."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed

from areal_rloo.config import load_config
from areal_rloo.learner.parallel import Ranks
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.models.loading import load_policy
from areal_rloo.models.reference import Reference
from areal_rloo.trajectory import Completion, Group, Trajectory

CPU = torch.device("cpu")
SETUPS = (
    ("algorithm.preset=rloo",),
    ("algorithm.preset=grpo", "algorithm.kl.adaptive={target: 1e-6, horizon: 100}"),
    ("algorithm.preset=dr_grpo", "algorithm.adv_norm.std_level=batch"),
    ("algorithm.preset=reinforce_plus_plus",),
    ("algorithm.preset=reinforce_plus_plus_baseline", "algorithm.loss.entropy_coefficient=0.1"),
    ("algorithm.preset=rloo_trl", "algorithm.rewards.mask_truncated=true"),
)


def _groups() -> list[Group]:
    """One group for each index from 0 to 6, ragged; every fourth completion truncated."""
    rng = np.random.default_rng(0)
    groups = []
    for group_id in range(7):
        prompt = rng.integers(2, 200, rng.integers(1, 6)).astype(np.int32)
        trajectories = []
        for index in range(int(rng.integers(2, 5))):
            num = int(rng.integers(1, 20))
            completion = Completion(
                rng.integers(2, 200, num).astype(np.int32),
                -rng.random(num, dtype=np.float32) - 4.5,
                np.full(num, 1, np.int32),
                "length" if (group_id + index) % 4 == 0 else "stop",
            )
            trajectories.append(Trajectory(group_id, index, prompt, completion, float(rng.random())))
        groups.append(Group(group_id, 2, tuple(trajectories)))
    return groups


def _gradients(folder: Path, groups: list[Group], ranks: Ranks) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Of every setup, the gradient as the optimizer would see it on this rank, and the KL coefficient afterwards."""
    gathered, coefficients = [], []
    for overrides in SETUPS:
        config = load_config(
            "quickstart.yaml",
            ["learner.num_minibatches=1", "learner.optimizer.max_grad_norm=1e9", *overrides],
        )
        reference = None
        if config.algorithm.kl.coefficient > 0:
            reference = Reference(load_policy(str(folder), device=CPU), device=CPU, offload=False)
        step = TrainStep(load_policy(str(folder), device=CPU), config, device=CPU, reference=reference, ranks=ranks)
        named = dict(step.model.named_parameters())
        step.optimizer.step = lambda *_, **__: None  # type: ignore[method-assign, assignment]
        step.schedule.step = lambda *_, **__: None  # type: ignore[method-assign]
        step.step(groups, policy_version=2)
        gathered.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        coefficients.append(step.kl_coefficient)
    return gathered, coefficients


def _rank(rank: int, size: int, store: str, folder: Path, output: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = torch.distributed.new_group()
    assert group is not None
    # Groups are cut apart: their trajectories are dealt out one by one.
    dealt = [
        Group(g.group_id, g.deadline, tuple(t for t in g.trajectories if (t.group_id + t.sample_index) % size == rank))
        for g in _groups()
    ]
    torch.save(_gradients(folder, [g for g in dealt if g.trajectories], Ranks(group)), output)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_gradients_add_up_to_that_of_one_rank_under_every_norm(
    tiny_folders: dict[str, Path], tmp_path: Path, size: int
) -> None:
    folder = tiny_folders["qwen2"]
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, size, str(tmp_path / "store"), folder, tmp_path / f"{rank}.pt"))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    expected, coefficients = _gradients(folder, _groups(), Ranks())
    assert coefficients[1] != 0.04, "the controller moved it"
    for process in processes:
        process.join()
        assert process.exitcode == 0
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    assert all(of_rank == pytest.approx(coefficients) for _, of_rank in saved)
    parts = [part for part, _ in saved]
    for index, overrides in enumerate(SETUPS):
        scale = max(float(gradient.abs().max()) for gradient in expected[index].values())
        assert scale > 0
        for name, gradient in expected[index].items():
            total = sum(part[index][name] for part in parts)
            torch.testing.assert_close(total, gradient, rtol=1e-4, atol=2e-6 * scale, msg=f"{overrides} {name}")


def test_alone_a_rank_has_everything() -> None:
    values, own = Ranks().gather(torch.tensor([1.0, 2.0]))
    assert values[own].tolist() == [1.0, 2.0]
    assert Ranks().total(torch.tensor([3.0])).tolist() == [3.0]
