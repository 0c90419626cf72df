"""Run learners of several ranks as real processes over Gloo, and return the results to tests."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from support.processes import quickly_started

from areal_rloo.config import Config
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.parallel.ranks import Ranks
from areal_rloo.learner.rank import LearnerRank
from areal_rloo.learner.team import Team, follow
from areal_rloo.ports import ReservedPorts

CPU = torch.device("cpu")
COMPILERS = [  # see `compiling_with`
    "aot_eager",
    pytest.param("inductor", marks=[pytest.mark.rare, pytest.mark.skipif(which("g++") is None, reason="no g++ here")]),
]


@dataclass(frozen=True)
class Job:
    """A learner to build, and the work of rank 0 with the team.

    Attributes:
        folder: of the model.
        config: of the run.
        work: a function of a module, so that processes can import the function.
        shards: of a checkpoint that every rank loads first.
        double: compute in float64.
        plain: gradient descent with rate 1, so the weights show the gradients; AdamW amplifies gradients near 0.
        compiler: the backend of torch.compile, see `compiling_with`.
    """

    folder: Path
    config: Config
    work: Callable[[Team, Config], Any]
    shards: Path | None = None
    double: bool = False
    plain: bool = False
    compiler: str = "inductor"


@contextmanager
def compiling_with(backend: str) -> Iterator[None]:
    """Let `learner.compile` compile with this backend of torch.

    `aot_eager` traces and differentiates the graphs as `inductor` does, and writes no C++: seconds instead of minutes.
    """
    compile_layer = torch.nn.Module.compile
    torch.nn.Module.compile = partialmethod(compile_layer, backend=backend)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.Module.compile = compile_layer  # type: ignore[method-assign]


def on_one(job: Job) -> Any:
    """Run the job in this process and return the result."""
    return job.work(Team(_rank(job, Ranks())), job.config)


def on_ranks(num: int, jobs: Sequence[Job], output: Path, *, new_programs: bool = False) -> list[Any]:
    """Return the results of the jobs on rank 0 of `num` processes, which run the jobs one after the other.

    With `new_programs`, each process starts as a new program, with the environment of this process.
    """
    context = multiprocessing.get_context("spawn") if new_programs else quickly_started()
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
        with compiling_with(job.compiler):
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
    torch.manual_seed(0)  # adapters start with random weights
    rank = build_rank(job.config, model_path=str(job.folder), device=CPU, ranks=ranks)
    if job.shards is not None:
        rank.load(job.shards, num_optimizer_steps=2)
    if job.double:
        rank.policy.double()
        if rank.reference is not None:
            rank.reference.policy.double()
    if job.plain:
        rank.optimizer = torch.optim.SGD((p for p in rank.policy.parameters() if p.requires_grad), lr=1.0)
        rank.schedule = torch.optim.lr_scheduler.LambdaLR(rank.optimizer, lambda step: 1.0)
    return rank
