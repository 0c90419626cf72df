"""Placement and plan: processes, hosts and devices."""

import json
from pathlib import Path

import pytest

from areal_rloo.config import Config, load_config
from areal_rloo.errors import ConfigError, PreflightError
from areal_rloo.launcher.placement import Host, Placement, place, resized, with_counts
from areal_rloo.launcher.plan import (
    JobRequest,
    Plan,
    ProcessSpec,
    as_json,
    as_table,
    on_network,
    plan_run,
    wire_address,
)

SGLANG = "rollout.engine=sglang"
ON_GPUS = ("rollout.device=auto", "learner.device=auto")


def hosts(num: int = 1, *, gpus: int = 8, cores: int = 16) -> list[Host]:
    ids = tuple(str(index) for index in range(gpus))
    return [Host(f"n{index}", f"10.0.0.{index + 1}", cores, ids, 64 * 2**30) for index in range(num)]


def config_of(*overrides: str) -> Config:
    return load_config("quickstart.yaml", list(overrides))


def placed(*overrides: str, on: list[Host]) -> tuple[Config, Placement]:
    config = with_counts(config_of(*overrides), on)
    placement = place(config, on)
    return on_network(config, placement), placement


def planned(*overrides: str, on: list[Host] | None = None) -> Plan:
    config, placement = placed(*overrides, on=on or hosts())
    wire = wire_address(config, 1, Path("/private") if len(placement.hosts) == 1 else None)
    request = JobRequest(config, placement, Path("/run"), wire, 9, resume=False)
    return plan_run(request, model_path="/model")


def running(plan: Plan) -> tuple[ProcessSpec, ...]:
    return (*plan.learner, *plan.workers)


def visible(plan: Plan) -> list[str]:
    return [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in running(plan)]


def test_learner_and_workers_have_separate_gpus() -> None:
    plan = planned("rollout.num_workers=2", *ON_GPUS)
    assert visible(plan) == ["0", "1", "2"]
    assert {spec.device for spec in running(plan)} == {"cuda"}


def test_a_worker_gets_tensor_parallel_gpus() -> None:
    plan = planned("rollout.num_workers=2", SGLANG, "rollout.tensor_parallel=3", *ON_GPUS)
    assert visible(plan) == ["0", "1,2,3", "4,5,6"]
    assert [spec.role for spec in plan.workers] == ["rollout worker and its SGLang server"] * 2


def test_a_worker_of_an_external_server_takes_no_gpu() -> None:
    urls = "rollout.sglang.urls=[http://127.0.0.1:1, http://127.0.0.1:2]"
    for count in ("2", "auto"):
        plan = planned(f"rollout.num_workers={count}", SGLANG, urls, *ON_GPUS, on=hosts(gpus=1))
        assert visible(plan) == ["0", "", ""]
        assert [spec.role for spec in plan.workers] == [
            "rollout worker of http://127.0.0.1:1",
            "rollout worker of http://127.0.0.1:2",
        ]
        assert [spec.command[-1] for spec in plan.workers] == [
            "--server-url=http://127.0.0.1:1",
            "--server-url=http://127.0.0.1:2",
        ]


def test_too_few_gpus_are_an_error_with_the_missing_number() -> None:
    with pytest.raises(PreflightError, match=r"needs 5 GPUs.*tensor_parallel=2.*the host has 4, 1 too few"):
        planned(
            *("rollout.num_workers=2", SGLANG, "rollout.tensor_parallel=2", "rollout.device=cuda"),
            "learner.device=cuda",
            on=hosts(gpus=4),
        )


def test_gpus_of_a_worker_on_two_hosts_are_an_error() -> None:
    spread = ("rollout.num_workers=2", SGLANG, "rollout.tensor_parallel=3", "learner.num_ranks=2")
    with pytest.raises(PreflightError, match=r"needs 8 GPUs.*the 2 hosts have 8, but not 3 together"):
        planned(*spread, *ON_GPUS, on=hosts(2, gpus=4))


def test_each_learner_rank_has_a_gpu_and_a_share_of_the_cores() -> None:
    plan = planned("rollout.num_workers=2", "learner.num_ranks=3", *ON_GPUS)
    assert [spec.name for spec in running(plan)] == ["learner", "learner-1", "learner-2", "rollout-0", "rollout-1"]
    assert visible(plan) == ["0", "1", "2", "3", "4"]
    assert {spec.num_threads for spec in running(plan)} == {16 // 5}
    assert all(f"--rank={rank}" in spec.command for rank, spec in enumerate(plan.learner))
    assert len({argument for spec in plan.learner for argument in spec.command if "--meeting" in argument}) == 1
    assert all(spec.max_restarts == 0 for spec in plan.learner), "none of them can begin anew alone"
    with pytest.raises(PreflightError, match=r"needs 6 GPUs.*learner.num_ranks=4.*has 5, 1 too few$"):
        planned("rollout.num_workers=2", "learner.num_ranks=4", *ON_GPUS, on=hosts(gpus=5))


def test_learner_ranks_are_packed_and_workers_are_spread() -> None:
    plan = planned("rollout.num_workers=6", "learner.num_ranks=10", *ON_GPUS, on=hosts(3))
    assert [spec.host for spec in plan.learner] == ["n0"] * 8 + ["n1"] * 2
    assert [spec.host for spec in plan.workers] == ["n2", "n2", "n1", "n2", "n1", "n2"]
    assert len({(spec.host, gpu) for spec in running(plan) for gpu in spec.gpu_ids}) == 16


def test_several_hosts_use_the_learner_s_address() -> None:
    config, _ = placed("rollout.num_workers=2", on=hosts(2, gpus=0))
    assert config.wire.host == "10.0.0.1"
    plan = planned("rollout.num_workers=2", on=hosts(2, gpus=0))
    assert [spec.host for spec in running(plan)] == ["n0", "n1", "n0"]
    assert all("--wire=tcp://10.0.0.1:1" in spec.command for spec in running(plan))
    assert "--same-host" not in plan.learner[0].command
    assert "--meeting=127.0.0.1:9" in plan.learner[0].command, "all ranks are on one host"
    spread = planned("rollout.num_workers=1", "learner.num_ranks=10", *ON_GPUS, on=hosts(3))
    assert all("--meeting=10.0.0.1:9" in spec.command for spec in spread.learner)
    assert plan.preparation is not None
    assert plan.preparation.host == "n0"
    assert "--models=/run/models" in plan.preparation.command


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ((), "ipc:///private/learner"),
        (("wire.host=::1",), "ipc:///private/learner"),
        (("wire.transport=tcp",), "tcp://127.0.0.1:1"),
        (("wire.transport=tcp", "wire.host=::1"), "tcp://[::1]:1"),
        (("wire.port=7",), "tcp://127.0.0.1:7"),
        (("wire.host=10.0.0.1",), "tcp://10.0.0.1:1"),
    ],
)
def test_a_wire_on_one_host_is_a_socket_file_unless_tcp_is_asked(options: tuple[str, ...], address: str) -> None:
    plan = planned("rollout.num_workers=2", *options, on=hosts(gpus=0))
    assert all(f"--wire={address}" in spec.command for spec in running(plan))


def test_a_run_on_one_host_uses_loopback() -> None:
    config, _ = placed("rollout.num_workers=2", on=hosts(gpus=0))
    assert config.wire.host == "127.0.0.1"
    plan = planned("rollout.num_workers=2", on=hosts(gpus=0))
    assert "--meeting=127.0.0.1:9" in plan.learner[0].command
    assert "--same-host" in plan.learner[0].command
    assert plan.preparation is not None
    assert not any("--models" in argument for argument in plan.preparation.command)


def test_auto_gives_a_quarter_of_the_gpus_to_the_learner() -> None:
    auto = ("rollout.num_workers=auto", "learner.num_ranks=auto", *ON_GPUS)
    for num_hosts, overrides, ranks, workers in (
        (1, (), 2, 6),
        (16, (), 32, 96),
        (2, (SGLANG, "rollout.tensor_parallel=2"), 4, 6),
        (1, ("learner.num_replicas=2",), 2, 6),
        (1, ("learner.num_ranks=1",), 1, 7),
        (1, ("rollout.num_workers=2",), 6, 2),
    ):
        config = with_counts(config_of(*auto, *overrides), hosts(num_hosts))
        assert (config.learner.num_ranks, config.rollout.num_workers) == (ranks, workers), overrides


def test_more_hosts_than_a_learner_takes_workers_are_refused() -> None:
    assert with_counts(config_of("rollout.num_workers=auto"), hosts(1024, gpus=0)).rollout.num_workers == 1024
    with pytest.raises(
        ConfigError, match=r"rollout.num_workers: expected at most 1024, auto gives 1025 on these hosts"
    ):
        with_counts(config_of("rollout.num_workers=auto"), hosts(1025, gpus=0))


def test_auto_without_gpus_is_one_rank_and_a_worker_per_host() -> None:
    config = with_counts(config_of("rollout.num_workers=auto", "learner.num_ranks=auto"), hosts(3, gpus=0))
    assert (config.learner.num_ranks, config.rollout.num_workers) == (1, 3)


def test_auto_is_refused_for_other_options() -> None:
    with pytest.raises(ConfigError, match=r"rollout.num_slots.*expected `?int"):
        config_of("rollout.num_slots=auto")


def test_table_and_json_show_every_process_and_host() -> None:
    config, placement = placed("rollout.num_workers=3", *ON_GPUS, on=hosts(2))
    plan = planned("rollout.num_workers=3", *ON_GPUS, on=hosts(2))
    table = as_table(plan, placement)
    assert "cuda:0" in table
    assert "n1 (10.0.0.2): 2 processes, 2 of 8 GPUs, 16 cores" in table
    shown = json.loads(as_json(plan, placement))
    assert [process["name"] for process in shown["processes"]] == [spec.name for spec in plan.processes]
    assert all(process["name"] in table for process in shown["processes"])
    keys = {"role", "host", "gpu_ids", "num_threads", "environment", "command", "max_restarts"}
    assert keys <= shown["processes"][0].keys()
    assert shown["max_learner_restarts"] == config.launcher.max_learner_restarts


def test_a_plan_is_deterministic() -> None:
    assert planned("rollout.num_workers=5", on=hosts(4)) == planned("rollout.num_workers=5", on=hosts(4))


def test_more_workers_take_free_gpus_and_fewer_keep_their_seats() -> None:
    _, placement = placed("rollout.num_workers=2", *ON_GPUS, on=hosts(2, gpus=4))
    grown = resized(placement, 7)
    assert grown.learner + grown.workers[:2] == placement.seats
    given = [(seat.host.name, seat.gpu_ids) for seat in grown.seats]
    assert len(set(given)) == 8, "each GPU once"
    assert resized(grown, 2) == placement
    with pytest.raises(PreflightError, match="num_workers: 8 workers need 1 free GPUs each, there is room for 7"):
        resized(placement, 8)


def test_more_workers_on_cpus_share_the_cores() -> None:
    _, placement = placed("rollout.num_workers=1", on=hosts(1, gpus=0))
    assert resized(placement, 3).workers == placement.workers * 3
