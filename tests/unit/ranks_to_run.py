"""Learners of several ranks as real processes over Gloo, for tests to ask what they computed."""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal_rloo.config import Config
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.parallel import Ranks
from areal_rloo.learner.rank import LearnerRank, follow
from areal_rloo.learner.team import Team
from areal_rloo.ports import ReservedPorts

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """A learner to build, and what rank 0 does with its team.

    Attributes:
        folder: of the model.
        config: of the run.
        work: a function of a module.
        double: compute in float64.
        plain: gradient descent at a rate of 1, which shows gradients in the weights; AdamW makes much of nearly 0.
    """

    folder: Path
    config: Config
    work: Callable[[Team, Config], Any]
    double: bool = False
    plain: bool = False


def on_one(job: Job) -> Any:
    """What the job gives in this process."""
    return job.work(Team(_rank(job, Ranks())), job.config)


def on_ranks(num: int, jobs: Sequence[Job], output: Path) -> list[Any]:
    """What each job gives on rank 0 of `num`, each a process; one after the other in the same processes."""
    context = multiprocessing.get_context("spawn")
    with ReservedPorts(1) as reserved:
        address = f"127.0.0.1:{reserved.ports[0]}"
        processes = [
            context.Process(target=_run, args=(rank, num, address, jobs, output), daemon=True) for rank in range(num)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(400)
    codes = [process.exitcode for process in processes]
    assert codes == [0] * num, f"exit codes of the ranks: {codes}"
    given: list[Any] = torch.load(output, weights_only=False)
    return given


def _run(rank: int, num: int, address: str, jobs: Sequence[Job], output: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.meet(address, rank=rank, num=num, device=CPU, timeout_s=60)
    given = []
    for job in jobs:
        own = _rank(job, ranks)
        if rank > 0:
            follow(own)
        else:
            team = Team(own)
            given.append(job.work(team, job.config))
            team.stop()
    if rank == 0:
        torch.save(given, output)
    ranks.close()


def _rank(job: Job, ranks: Ranks) -> LearnerRank:
    torch.manual_seed(0)  # adapters begin with random numbers
    rank = build_rank(job.config, model_path=str(job.folder), device=CPU, ranks=ranks)
    if job.double:
        rank.policy.double()
        if rank.reference is not None:
            rank.reference.policy.double()
    if job.plain:
        rank.optimizer = torch.optim.SGD((p for p in rank.policy.parameters() if p.requires_grad), lr=1.0)
        rank.schedule = torch.optim.lr_scheduler.LambdaLR(rank.optimizer, lambda step: 1.0)
    return rank
