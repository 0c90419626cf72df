"""Limits of the system, of a container and of the memory, each lowered."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.situations import REPO, found, only

from areal_rloo import container_limits
from areal_rloo.config import load_config
from areal_rloo.container_limits import cgroup_value, cpu_quota
from areal_rloo.errors import UserError
from areal_rloo.launcher.doctor.limits import (
    check_cores,
    check_limits,
    check_memory,
    check_plan,
    check_process_limit,
    check_processes,
)
from areal_rloo.launcher.placement import Host
from areal_rloo.launcher.start import check


def _limited(limits: str) -> dict[str, dict[str, str]]:
    """Findings by name, of a doctor with these soft limits."""
    command = f"ulimit -S {limits}; exec {sys.executable} -m areal_rloo.launcher.doctor --quick --json"
    done = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True, check=False)
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_more_processes_than_the_host_can_run_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits.num_cores", lambda: 2)
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits.memory", lambda: (16 * 2**30, 16 * 2**30))
    assert found(check_processes, "rollout.num_workers=64", "learner.num_ranks=64") == []
    assert only(check_processes, "wrong", "rollout.num_workers=65").name == "rollout.num_workers"
    assert "at most 64 processes on 2 cores" in only(check_processes, "wrong", "learner.num_ranks=65").what
    few = only(check_processes, "wrong", "rollout.num_reward_workers=257")
    assert few.name == "rollout.num_reward_workers"
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits.memory", lambda: (2**30, 2**30))
    assert "8 processes take at least 1.172 GiB" in only(check_processes, "wrong", "rollout.num_workers=8").what


def test_more_threads_of_a_process_than_the_host_can_run_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, most in ((2, 128), (100, 1600)):
        monkeypatch.setattr("areal_rloo.launcher.doctor.limits.num_cores", lambda cores=cores: cores)
        assert found(check_processes, f"rollout.num_threads={most}", f"learner.num_threads={most}") == []
        for key in ("rollout.num_threads", "learner.num_threads"):
            many = only(check_processes, "wrong", f"{key}={most + 1}")
            assert (many.name, f"at most {most} threads of a process on {cores} cores" in many.what) == (key, True)


def test_low_limits_are_reported() -> None:
    few = _limited("-n 100 -u 100")
    assert (few["open files"]["state"], few["processes"]["state"]) == ("wrong", "wrong")
    assert few["open files"]["what"].startswith("ulimit -n is 100, a run needs some")
    assert few["open files"]["fix"].startswith("ulimit -n 4096")
    some = _limited("-n 1024 -f 1000000")
    assert (some["open files"]["state"], some["file size"]["state"]) == ("unsure", "unsure")


def test_the_fix_names_a_hard_limit_that_is_too_low() -> None:
    code = (
        "import resource; from areal_rloo.launcher.doctor.limits import Situation, check_limits; "
        f"resource.setrlimit({resource.RLIMIT_NOFILE}, (200, 300)); print(next(check_limits(Situation())).fix)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ulimit -n 4096; the hard limit is 300: raise it in limits.conf"


def test_a_container_s_limit_is_the_lowest_of_its_groups(tmp_path: Path) -> None:
    inner = tmp_path / "cgroup" / "job" / "task"
    inner.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/job/task\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1000\n")
    root = tmp_path / "cgroup"
    assert cpu_quota(root, membership) == 1.5
    assert cgroup_value("memory.max", root, membership) == 1000
    assert cgroup_value("pids.max", root, membership) is None
    assert cpu_quota(root, tmp_path / "absent") is None


def test_a_container_s_limits_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = "areal_rloo.launcher.doctor.limits."
    monkeypatch.setattr(f"{limits}cpu_quota", lambda: 0.5)
    assert "the container may use 0.5" in only(check_cores, "unsure").what
    monkeypatch.setattr(f"{limits}cgroup_value", {"pids.max": 100, "pids.current": 10}.get)
    assert "90 more processes" in only(check_process_limit, "wrong").what
    monkeypatch.setattr(container_limits, "cgroup_value", {"memory.max": 1000, "memory.current": 400}.get)
    assert only(check_memory, "ok").what == "600 B of 1000 B free"
    monkeypatch.setattr(f"{limits}cgroup_value", {"pids.max": 2000, "pids.current": 0}.get)
    assert only(check_process_limit, "unsure")


def test_little_memory_and_much_swap_are_unsure(huge_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap = SimpleNamespace(used=2**33)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10**15, available=2**30))
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap)
    assert only(check_memory, "unsure").what.startswith("8 GiB in use")
    swap.used = 0
    assert "of 909.5 TiB free; a run takes" in only(check_memory, "unsure", f"model.path={huge_model}").what


def test_the_parts_of_a_run_on_a_cpu_are_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5B parameters in float32: 8 GB to train and 5 for a row, 4 in an engine with evaluation, 4 for two versions."""
    sizes = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **heads}))
    (model / "model.safetensors.index.json").unlink()  # the files of a small model would be counted
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits.policy_parameters", lambda _: 494_000_000)
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits.memory", lambda: (2**35, 2**35))
    options = (f"model.path={model}", "model.dtype=float32")
    what = only(check_memory, "ok", *options).what
    assert re.search(r"takes about \S+ GiB: learner 13\.\d+ GiB, engines 3\.68\d? GiB, versions of the weights 3", what)
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits.memory", lambda: (2**34 - 2**30, 2**33))
    assert only(check_memory, "wrong", *options).fix.startswith("take a larger host")
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits.memory", lambda: (2**35, 2**35))
    gpu = Host("n", "127.0.0.1", 8, ("0",), 2**35, 80 * 10**9)
    monkeypatch.setattr("areal_rloo.launcher.doctor.base.host_to_show", lambda _: (gpu, ""))
    copies = "loads and checkpoints 7.361 GiB, versions of the weights 3.681 GiB"
    assert f"takes about 11.04 GiB: {copies}" in only(check_memory, "ok", *options).what
    assert f"learner 3.681 GiB, {copies}" in only(check_memory, "ok", *options, "learner.offload=optimizer").what


def test_a_model_is_counted_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits.memory", lambda: (2**33, 2**33))
    options = ("model.path=Qwen/Qwen2.5-1.5B-Instruct", "model.dtype=bfloat16")
    what = only(check_memory, "wrong", *options, HF_HUB_CACHE="/nonexistent").what
    assert re.search(r"learner 33\.\d+ GiB, loads and checkpoints 2\.875 GiB, engines 5\.75\d? GiB", what), what
    on_gpus = only(check_memory, "wrong", *options, "rollout.engine=sglang", HF_HUB_CACHE="/nonexistent")
    assert on_gpus.fix.startswith("start where GPUs are, or take a larger host"), "this host is not the one of the run"


@pytest.mark.parametrize("gibibytes", [8, 2**20])
def test_too_little_memory_is_said_beside_a_thing_to_install(gibibytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever installs or downloads first would be refused afterwards."""
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits.memory", lambda: (gibibytes * 2**30,) * 2)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")
    config = load_config("gsm8k_rloo.yaml", ["rollout.engine=embedded", "data.train.path=null"])
    with pytest.raises(UserError) as refused:
        check(config)
    missing, _, lacks = str(refused.value).partition("; besides, ")
    assert missing.startswith("model.path: Qwen/Qwen2.5-1.5B-Instruct: not in ")
    assert lacks.startswith("memory: 8 GiB of 8 GiB free; a run takes about") == (gibibytes == 8)


def test_the_hosts_of_a_job_are_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on two hosts has more GPUs than this host; the memory of this host is that of its own processes."""
    gpus = Host("n", "127.0.0.1", 8, ("0", "1"), 2**38, 80 * 10**9)
    monkeypatch.setattr("areal_rloo.launcher.doctor.base.host_to_show", lambda _: (gpus, ""))
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits.memory", lambda: (2**38, 2**38))
    options = ("model.path=Qwen/Qwen2.5-1.5B-Instruct", "learner.num_ranks=3", "rollout.num_workers=1")
    job = (*options, "launcher.num_hosts=2", "weights.transport=collective", "learner.offload=optimizer")
    assert "a rank needs about" in only(check_plan, "ok", *job, HF_HUB_CACHE="/nonexistent").what
    what = only(check_memory, "ok", *job, HF_HUB_CACHE="/nonexistent").what
    assert "learner 7.667 GiB" in what, "two of three ranks: two thirds of 11.5 GiB"


def test_a_limit_of_locked_memory_is_unsure_with_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr("areal_rloo.launcher.doctor.limits._INFINIBAND", tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 65536))
    (finding,) = [finding for finding in found(check_limits) if finding.name == "locked memory"]
    assert (finding.state, finding.what) == ("unsure", "ulimit -l is 64 KiB, and InfiniBand locks buffers in memory")


def test_more_threads_than_cores_are_unsure() -> None:
    many = f"rollout.num_threads={10 * (os.cpu_count() or 1)}"
    assert only(check_cores, "unsure", many).name == "threads"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("rollout.engine=vllm",), "rollout.engine: expected a model with heads of 32, "),
        (("rollout.engine=sglang", "rollout.tensor_parallel=5"), "rollout.tensor_parallel: expected 1 or 2"),
        (("rollout.share_devices=side_by_side",), "rollout.share_devices: expected never or in_turns without a GPU"),
    ],
)
def test_what_a_plan_refuses_without_a_gpu_is_wrong(options: tuple[str, ...], what: str) -> None:
    assert only(check_plan, "wrong", *options).what.startswith(what)


def test_a_learner_too_large_for_the_gpu_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("model.path=Qwen/Qwen2.5-1.5B-Instruct", "learner.gradient_checkpointing=true")
    assert only(check_plan, "ok", *options).what.startswith("learner: a rank needs about"), "no GPU here"
    hosts = {size: Host("n", "127.0.0.1", 8, ("0",), 2**38, size * 10**9) for size in (24, 80)}
    monkeypatch.setattr("areal_rloo.launcher.doctor.base.host_to_show", lambda _: (hosts[80], ""))
    assert "learner: a rank needs about" in only(check_plan, "ok", *options).what
    long = ("rollout.engine=sglang", "rollout.sampling.max_new_tokens=8000", "rollout.num_slots=4000")
    few = only(check_plan, "unsure", *options, *long, "learner.microbatch_tokens=auto")
    assert re.search(r"the cache holds \d+ of full length, and rollout\.num_slots is 4000$", few.what)
    assert few.fix.startswith("set rollout.num_slots=")
    monkeypatch.setattr("areal_rloo.launcher.doctor.base.host_to_show", lambda _: (hosts[24], ""))
    wrong = only(check_plan, "wrong", *options)
    assert "; a GPU has 22.4 GiB (24 GB)" in wrong.what
    assert wrong.fix.startswith("set learner.offload=")
