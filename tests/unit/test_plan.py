"""What is started, and on which devices."""

from pathlib import Path

import pytest

from areal_rloo.config import Config, load_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.plan import Addresses, Machine, ProcessSpec, plan_run


def planned(*overrides: str, gpus: int = 8, workers: int = 2) -> list[ProcessSpec]:
    config: Config = load_config("quickstart.yaml", [f"rollout.num_workers={workers}", *overrides])
    return plan_run(
        config,
        Machine(16, tuple(str(index) for index in range(gpus))),
        run_folder=Path("/run"),
        model_path="/model",
        addresses=Addresses(1, 9, tuple(range(2, 3 + workers)), Path("/segments")),
        resume=False,
        warm_start_s=0.0,
    )


def visible(specs: list[ProcessSpec]) -> list[str]:
    return [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs]


def test_the_learner_and_each_worker_have_a_gpu_of_their_own() -> None:
    specs = planned("rollout.device=auto", "learner.device=auto")
    assert visible(specs) == ["0", "1", "2"]
    assert {spec.device for spec in specs} == {"cuda"}


def test_a_worker_has_as_many_gpus_as_its_model_is_spread_over() -> None:
    specs = planned("rollout.engine=sglang", "rollout.tensor_parallel=3", "rollout.device=auto", "learner.device=auto")
    assert visible(specs) == ["0", "1,2,3", "4,5,6"]
    assert [spec.role for spec in specs[1:]] == ["rollout worker and its SGLang server"] * 2


def test_a_worker_whose_server_runs_already_takes_no_gpu_here() -> None:
    urls = "rollout.sglang.urls=[http://127.0.0.1:1, http://127.0.0.1:2]"
    specs = planned("rollout.engine=sglang", urls, "rollout.device=auto", "learner.device=auto", gpus=1)
    assert visible(specs) == ["0", "", ""]
    assert [spec.role for spec in specs[1:]] == [
        "rollout worker of http://127.0.0.1:1",
        "rollout worker of http://127.0.0.1:2",
    ]
    assert [spec.command[-1] for spec in specs[1:]] == [
        "--server-url=http://127.0.0.1:1",
        "--server-url=http://127.0.0.1:2",
    ]


def test_more_gpus_than_there_are_is_refused_by_name() -> None:
    with pytest.raises(PreflightError, match=r"needs 5 GPUs.*tensor_parallel=2.*this machine has 4"):
        planned(
            "rollout.engine=sglang", "rollout.tensor_parallel=2", "rollout.device=cuda", "learner.device=cuda", gpus=4
        )


def test_each_rank_of_the_learner_is_a_process_with_a_gpu_and_a_share_of_the_cores() -> None:
    specs = planned("learner.num_ranks=3", "rollout.device=auto", "learner.device=auto")
    assert [spec.name for spec in specs] == ["learner", "learner-1", "learner-2", "rollout-0", "rollout-1"]
    assert visible(specs) == ["0", "1", "2", "3", "4"]
    assert {spec.num_threads for spec in specs} == {16 // 5}
    assert all(f"--rank={rank}" in spec.command for rank, spec in enumerate(specs[:3]))
    assert len({argument for spec in specs[:3] for argument in spec.command if "--meeting" in argument}) == 1
    assert all(spec.max_restarts == 0 for spec in specs[:3]), "none of them can begin anew alone"
    with pytest.raises(PreflightError, match=r"needs 6 GPUs.*learner.num_ranks=4.*lower learner.num_ranks"):
        planned("learner.num_ranks=4", "rollout.device=auto", "learner.device=auto", gpus=5)
