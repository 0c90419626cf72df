"""What is looked at before a run, each made to fail: on real files, ports, limits and processes."""

import http.server
import json
import os
import resource
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_rloo.config import Config, load_config
from areal_rloo.errors import ModelError, PreflightError, UserError
from areal_rloo.launcher import preflight
from areal_rloo.launcher.findings import Check, Finding, Situation, findings, guarded
from areal_rloo.launcher.findings.addresses import (
    check_host_name,
    check_hub,
    check_ports,
    check_servers,
    check_wire_host,
)
from areal_rloo.launcher.findings.base import within
from areal_rloo.launcher.findings.devices import Device, TorchSeen, check_gpus, check_torch
from areal_rloo.launcher.findings.disk import (
    check_clock,
    check_free_disk,
    check_run_folder,
    check_shared_memory,
    clock_finding,
    file_system,
)
from areal_rloo.launcher.findings.inputs import (
    check_data_files,
    check_functions,
    check_hub_models,
    check_models,
    check_sglang,
    check_sglang_imports,
    check_tool_sandbox,
)
from areal_rloo.launcher.findings.limits import (
    cgroup_value,
    check_cores,
    check_limits,
    check_memory,
    check_process_limit,
    cpu_quota,
)
from areal_rloo.launcher.findings.software import check_packages, check_python, check_variables

REPO = Path(__file__).resolve().parents[2]
BARE = {"PATH": os.environ["PATH"]}
HUGE = 10**12  # parameters, which no machine of these days has room for


def config(*overrides: str) -> Config:
    return load_config("quickstart.yaml", overrides)


def found(check: Check, *overrides: str, folder: Path | None = None, **environment: str) -> list[Finding]:
    situation = Situation(config(*overrides), folder, environment={**BARE, **environment})
    return list(check(situation))


def only(check: Check, state: str, *overrides: str, folder: Path | None = None, **environment: str) -> Finding:
    """The one finding in this state; every one that is not ok says what to do."""
    every = found(check, *overrides, folder=folder, **environment)
    assert all(finding.fix for finding in every if finding.state != "ok"), every
    (finding,) = [finding for finding in every if finding.state == state]
    assert (finding.error is not None) == (state == "wrong")
    return finding


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder in two files of weights, 12 numbers in all."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name in names:
        save_file({name: np.zeros((2, 3), np.float32)}, folder / name)
    index = {"weight_map": {name: name for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def huge_model(model: Path) -> Path:
    """A model whose files are as long as they say, and mostly holes."""
    header = {"weight": {"dtype": "BF16", "shape": [HUGE], "data_offsets": [0, 2 * HUGE]}}
    text = json.dumps(header).encode()
    (model / "model.safetensors.index.json").unlink()
    for file in model.glob("*.safetensors"):
        file.unlink()
    with (model / "model.safetensors").open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        try:
            opened.truncate(8 + len(text) + 2 * HUGE)
        except OSError:
            pytest.skip("this file system has no files of that length")
    return model


@pytest.fixture
def server() -> Iterator[str]:
    """An HTTP server that has /health and org/there, and nothing else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in ("/health", "/org/there/resolve/main/config.json") else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


# Models.


def test_a_whole_model_is_counted(model: Path) -> None:
    assert only(check_models, "ok", f"model.path={model}").what == f"{model}: 12 parameters"


def test_a_missing_shard_is_named(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    finding = only(check_models, "wrong", f"model.path={model}")
    assert "1 of its 2 files of weights are missing, the first is model-00002-of-00002.safetensors" in finding.what
    assert finding.fix == "download the model again"
    assert isinstance(finding.error, ModelError)


def test_a_file_cut_short_is_named(model: Path) -> None:
    file = model / "model-00001-of-00002.safetensors"
    num_bytes = file.stat().st_size
    os.truncate(file, num_bytes - 1)
    assert f"it has {num_bytes - 1} of {num_bytes} bytes" in only(check_models, "wrong", f"model.path={model}").what


@pytest.mark.parametrize("content", [b"", b"PK\3\4 a zip file", b"\x10\0\0\0\0\0\0\0{not json", b"\2\0\0\0\0\0\0\0[]"])
def test_a_file_of_the_wrong_kind_is_named(model: Path, content: bytes) -> None:
    (model / "model-00001-of-00002.safetensors").write_bytes(content)
    assert "model-00001-of-00002.safetensors is not whole" in only(check_models, "wrong", f"model.path={model}").what


def test_a_pointer_of_git_lfs_is_known(model: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n"
    (model / "model-00001-of-00002.safetensors").write_text(pointer)
    assert only(check_models, "wrong", f"model.path={model}").fix == "run git lfs pull in its folder"


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_said(model: Path, index: str) -> None:
    (model / "model.safetensors.index.json").write_text(index)
    assert "index.json cannot be read" in only(check_models, "wrong", f"model.path={model}").what


def test_a_folder_without_weights_a_checkpoint_and_a_file_are_no_models(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    assert "no .safetensors file in it" in only(check_models, "wrong", f"model.path={bare}").what
    checkpoint = tmp_path / "step-000001"
    checkpoint.mkdir()
    model.rename(checkpoint / "model")
    assert only(check_models, "wrong", f"model.path={checkpoint}").fix == f"its model is {checkpoint / 'model'}"
    assert "config.json cannot be read" in only(check_models, "wrong", f"model.path={bare / 'config.json'}").what


def test_a_policy_needs_a_tokenizer_and_a_reference_none(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    states = [f.state for f in found(check_models, f"model.path={model}", f"model.reference.path={model}")]
    assert states == ["wrong", "ok"]


def test_a_model_elsewhere_is_no_mistake_where_a_job_is_only_submitted() -> None:
    submitting = Situation(config("model.path=/nowhere/model"), runs_here=False)
    (finding,) = check_models(submitting)
    assert (finding.state, finding.what) == ("unsure", "/nowhere/model: not on this host")


def test_a_name_of_the_hub_offline_is_wrong_unless_all_of_it_is_in_the_cache(model: Path, tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path / "hf")}
    named = "model.path=org/name"
    assert "every host would download it" in only(check_hub_models, "unsure", named, **home).what
    offline = {**home, "HF_HUB_OFFLINE": "1"}
    finding = only(check_hub_models, "wrong", named, **offline)
    assert "not in " in finding.what and finding.fix.startswith("unset HF_HUB_OFFLINE")
    cached = tmp_path / "hf" / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    model.rename(cached / "snapshots" / "abc")
    assert only(check_hub_models, "ok", named, **offline).what == "org/name: downloaded, 12 parameters"
    (cached / "snapshots" / "abc" / "model-00001-of-00002.safetensors").unlink()
    assert "1 of its 2 files of weights are missing" in only(check_hub_models, "wrong", named, **offline).what


def test_a_name_that_the_hub_does_not_have_is_wrong(server: str, tmp_path: Path) -> None:
    where = {"HF_ENDPOINT": server, "HF_HOME": str(tmp_path)}
    assert only(check_hub, "wrong", "model.path=org/absent", **where).what == f"org/absent: {server}: HTTP 404"
    assert only(check_hub, "ok", "model.path=org/there", **where)
    assert found(check_hub, "model.path=org/absent", **where, HF_HUB_OFFLINE="1") == []


# Data, functions, tools, SGLang.


def test_data_and_functions_that_are_not_there_are_wrong(tmp_path: Path) -> None:
    finding = only(check_data_files, "wrong", "data.train.task=gsm8k", f"data.train.path={tmp_path}/no.jsonl")
    assert finding.what.endswith("no.jsonl: no such file")
    assert only(check_data_files, "ok").name == "data"
    finding = only(check_functions, "wrong", "algorithm.group_filter=no.py:keep")
    assert (finding.name, "no.py cannot be imported" in finding.what) == ("algorithm.group_filter", True)


def test_a_sandbox_that_could_read_the_run_folder_is_wrong() -> None:
    tools = ("rollout.episode.type=tool_use", "rollout.episode.tools=[python]")
    (finding,) = found(check_tool_sandbox, *tools, folder=Path(sysconfig.get_paths()["purelib"]) / "runs")
    assert finding.state == "wrong"
    assert found(check_tool_sandbox) == []


def test_a_python_without_sglang_is_wrong_and_so_is_one_whose_sglang_fails(tmp_path: Path) -> None:
    sglang = ("rollout.engine=sglang", f"rollout.sglang.python={sys.executable}")
    assert f"{sys.executable} has no sglang" in only(check_sglang, "wrong", *sglang).what
    broken = tmp_path / "python"
    broken.write_text(
        "#!/bin/sh\ncase \"$2\" in *importlib*) exit 0;; esac\necho 'ImportError: no libnuma' >&2; exit 1\n"
    )
    broken.chmod(0o755)
    sglang = ("rollout.engine=sglang", f"rollout.sglang.python={broken}")
    assert only(check_sglang, "ok", *sglang)
    assert only(check_sglang_imports, "wrong", *sglang).what.endswith("ImportError: no libnuma")
    broken.write_text("#!/bin/sh\necho 'sglang 0.1 with torch 2'\n")
    assert only(check_sglang_imports, "unsure", *sglang).what.startswith("sglang 0.1 with torch 2; tested is ")


def test_servers_and_services_that_do_not_answer_are_wrong(server: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        urls = ("rollout.engine=sglang", "rollout.num_workers=2", f"rollout.sglang.urls=[{server}, {dead}]")
        answered, refused = found(check_servers, *urls)
        assert (answered.state, refused.state) == ("ok", "wrong")
        assert dead in refused.what and "refused" in refused.what
        rewards = f"data.train.rewards=[{{url: {dead}/score}}]"
        assert only(check_servers, "wrong", rewards).name == "rewards"


# Addresses.


def test_a_taken_port_is_wrong_and_so_is_one_that_a_worker_would_take() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert only(check_ports, "wrong", f"wire.port={port}").what.startswith(
            f"port {port} is in use (Address already"
        )
        _, second = found(check_ports, f"telemetry.metrics_port={port - 1}")
        assert second.state == "wrong" and str(port) in second.what


def test_an_address_of_another_host_is_no_place_to_listen() -> None:
    assert "is no address of this host" in only(check_wire_host, "wrong", "wire.host=203.0.113.7").what
    assert only(check_wire_host, "unsure", "wire.host=0.0.0.0")
    assert found(check_wire_host, "wire.host=127.0.0.1") == []


def test_a_host_that_cannot_look_itself_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert "no other host can call" in only(check_host_name, "unsure").what
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
    assert "cannot be resolved" in only(check_host_name, "unsure").what


# The disk, shared memory, clocks.


def test_a_folder_that_cannot_be_made_is_wrong_and_one_that_can_is_not_left_behind(tmp_path: Path) -> None:
    assert "/proc/run cannot be written" in only(check_run_folder, "wrong", folder=Path("/proc/run")).what
    assert only(check_run_folder, "ok", folder=tmp_path / "a" / "b")
    assert only(check_clock, "ok", folder=tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    full = tmp_path / "file"
    full.touch()
    assert "cannot be written" in only(check_run_folder, "wrong", folder=full).what


def test_a_file_system_over_objects_is_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    monkeypatch.setattr("areal_rloo.launcher.findings.disk._OBJECT_STORES", (file_system(tmp_path),))
    assert "rename may be seen late" in only(check_run_folder, "unsure", folder=tmp_path).what


def test_a_file_system_without_locks_is_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError("Function not implemented")  # what Lustre says that is mounted without locks

    monkeypatch.setattr("fcntl.flock", refuse)
    assert "does not lock files" in only(check_run_folder, "unsure", folder=tmp_path).what


def test_a_full_disk_and_one_without_room_for_a_checkpoint_are_wrong(tmp_path: Path, huge_model: Path) -> None:
    least = f"launcher.min_free_disk_bytes={10**18}"
    assert (
        f"expected launcher.min_free_disk_bytes={10**18} or more"
        in only(check_free_disk, "wrong", least, folder=tmp_path).what
    )
    finding = only(check_free_disk, "wrong", f"model.path={huge_model}", folder=tmp_path)
    assert "not one fits" in finding.what
    assert only(check_free_disk, "ok", folder=tmp_path / "not" / "there")


def test_weights_beyond_the_shared_memory_and_the_memory_are_wrong(huge_model: Path) -> None:
    huge = f"model.path={huge_model}"
    assert "two versions of the weights" in only(check_shared_memory, "wrong", huge).what
    assert found(check_shared_memory, huge, "weights.transport=collective") == []
    assert "weights and optimizer states alone" in only(check_memory, "wrong", huge).what
    assert only(check_memory, "ok").name == "memory"


def _usage(free_bytes: int) -> Callable[[Path], Any]:
    return lambda _: SimpleNamespace(total=10**15, free=free_bytes)


def test_room_for_one_checkpoint_but_not_for_all_that_are_kept_is_doubted(
    huge_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some 16 bytes a parameter; two segments of 4 bytes fit, and three do not."""
    huge = f"model.path={huge_model}"
    monkeypatch.setattr("shutil.disk_usage", _usage(30 * HUGE))
    assert (
        "checkpoint.keep=2 of them and the next need" in only(check_free_disk, "unsure", huge, folder=huge_model).what
    )
    monkeypatch.setattr("shutil.disk_usage", _usage(10 * HUGE))
    assert "with a slow worker" in only(check_shared_memory, "unsure", huge).what
    monkeypatch.setattr("shutil.disk_usage", _usage(13 * HUGE))
    assert only(check_shared_memory, "ok", huge)
    monkeypatch.setattr("shutil.disk_usage", _usage(64 * 2**20))  # what a container gets
    situation = Situation()
    (finding,) = check_shared_memory(situation)
    assert (finding.state, "--shm-size" in finding.fix) == ("unsure", True)


def test_a_disk_without_inodes_and_a_shared_memory_that_is_shut_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_files=10**6, f_favail=3))
    monkeypatch.setattr("shutil.disk_usage", _usage(10**15))
    assert "has room for 3 files" in only(check_free_disk, "wrong", folder=tmp_path).what
    monkeypatch.setattr("areal_rloo.launcher.findings.disk.segment_folder", lambda _: tmp_path / "areal_rloo-")
    assert (
        only(check_shared_memory, "unsure").what == f"/dev/shm cannot be written; weights would go through {tmp_path}"
    )


def test_another_clock_is_doubted_and_far_off_it_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [clock_finding("clock", "it", s).state for s in (1.0, -10.0, 3600.0)] == ["ok", "unsure", "wrong"]
    real = time.time  # noqa: TID251 - a clock is what is turned
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    assert "3.6e+03 s ahead of this host" in only(check_clock, "wrong", folder=tmp_path).what


def test_disks_that_are_not_mounted_where_a_job_is_submitted_are_left_alone() -> None:
    submitting = Situation(config(), Path("/nowhere/shared/run"), runs_here=False)
    (finding,) = check_run_folder(submitting)
    assert finding.state == "unsure"
    assert not [*check_free_disk(submitting), *check_clock(submitting)]
    assert not Path("/nowhere").exists()


# Limits.


def _limited(limits: str) -> dict[str, dict[str, str]]:
    """Findings by name, of a doctor with these soft limits."""
    command = f"ulimit -S {limits}; exec {sys.executable} -m areal_rloo.launcher.doctor --quick --json"
    done = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True, check=False)
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_lowered_limits_are_seen() -> None:
    few = _limited("-n 100 -u 100")
    assert (few["open files"]["state"], few["processes"]["state"]) == ("wrong", "wrong")
    assert few["open files"]["what"].startswith("ulimit -n is 100, a run needs some")
    assert few["open files"]["fix"].startswith("ulimit -n 4096")
    some = _limited("-n 1024 -f 1000000")
    assert (some["open files"]["state"], some["file size"]["state"]) == ("unsure", "unsure")


def test_a_hard_limit_that_is_too_low_is_in_the_fix() -> None:
    code = (
        "import resource; from areal_rloo.launcher.findings.limits import Situation, check_limits; "
        f"resource.setrlimit({resource.RLIMIT_NOFILE}, (200, 300)); print(next(check_limits(Situation())).fix)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ulimit -n 4096; the hard limit is 300: raise it in limits.conf"


def test_a_containers_limits_are_the_least_of_its_groups(tmp_path: Path) -> None:
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


def test_a_containers_limits_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = "areal_rloo.launcher.findings.limits."
    monkeypatch.setattr(f"{limits}cpu_quota", lambda: 0.5)
    assert "the container may use 0.5" in only(check_cores, "unsure").what
    monkeypatch.setattr(f"{limits}cgroup_value", {"pids.max": 100, "pids.current": 10}.get)
    assert "90 more processes" in only(check_process_limit, "wrong").what
    monkeypatch.setattr(f"{limits}cgroup_value", {"memory.max": 1000, "memory.current": 400}.get)
    assert only(check_memory, "ok").what == "600 B of 1000 B free"
    monkeypatch.setattr(f"{limits}cgroup_value", {"pids.max": 2000, "pids.current": 0}.get)
    assert only(check_process_limit, "unsure")


def test_little_memory_and_much_swap_are_doubted(huge_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = {"MemTotal": 10**15, "MemAvailable": 2**30, "SwapTotal": 2**34, "SwapFree": 2**33}
    monkeypatch.setattr("areal_rloo.launcher.findings.limits.meminfo", kernel.get)
    assert only(check_memory, "unsure").what.startswith("8 GiB in use")
    kernel["SwapFree"] = kernel["SwapTotal"]
    assert "of 909.5 TiB free; weights" in only(check_memory, "unsure", f"model.path={huge_model}").what


def test_memory_that_cannot_be_locked_matters_where_there_is_infiniband(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr("areal_rloo.launcher.findings.limits._INFINIBAND", tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 65536))
    (finding,) = [finding for finding in found(check_limits) if finding.name == "locked memory"]
    assert (finding.state, finding.what) == ("unsure", "ulimit -l is 64 KiB, and InfiniBand registers its buffers")


def test_more_threads_than_cores_are_doubted() -> None:
    many = f"rollout.num_threads={10 * (os.cpu_count() or 1)}"
    assert only(check_cores, "unsure", many).name == "threads"


# Software.


def test_a_python_or_package_that_is_too_old_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert only(check_python, "ok")
    assert only(check_packages, "ok")
    (tmp_path / "torch").mkdir()
    assert only(check_python, "unsure", PYTHONPATH=str(tmp_path)).name == "PYTHONPATH"
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    assert "is 3.10.1, 3.11 or newer is needed" in only(check_python, "wrong").what
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["msgspec>=99", "nobody-has-this", "ray>=99; extra"])
    newer, absent, _ = found(check_packages)
    assert newer.what.endswith("99 or newer is needed") and newer.fix.endswith("-m pip install 'msgspec>=99'")
    assert absent.what.startswith("nobody-has-this is not installed")
    monkeypatch.undo()
    monkeypatch.setattr("areal_rloo.launcher.findings.software._DISTRIBUTION", "nobody-has-this")
    assert "is not installed in" in only(check_packages, "unsure").what


@pytest.mark.parametrize(
    ("variable", "value", "state", "words"),
    [
        ("NCCL_SOCKET_IFNAME", "nope", "wrong", "nope: no such interface; there are "),
        ("NCCL_SOCKET_IFNAME", "=l", "wrong", "no such interface"),
        ("NCCL_SOCKET_IFNAME", "^a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z", "wrong", "no such interface"),
        ("NCCL_SOCKET_IFNAME", "lo", "unsure", "no other host"),
        ("GLOO_SOCKET_IFNAME", "nope", "wrong", "no such interface"),
        ("GLOO_SOCKET_IFNAME", "lo,nope", "wrong", "no such interface"),
        ("NCCL_IB_HCA", "mlx5_99", "wrong", "no such adapter"),
        ("NCCL_P2P_DISABLE", "1", "unsure", "instead of directly"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "unsure", "waits for ever"),
        ("http_proxy", "http://proxy:3128", "unsure", "through a proxy"),
    ],
)
def test_a_variable_that_stands_in_the_way_is_told(variable: str, value: str, state: str, words: str) -> None:
    finding = only(check_variables, state, **{variable: value})
    assert finding.name == variable
    assert words in finding.what
    assert variable in finding.fix or "no_proxy" in finding.fix


def test_an_interface_that_is_down_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "operstate").write_text("down\n")
    monkeypatch.setattr("areal_rloo.launcher.findings.software._INTERFACES", tmp_path)
    assert only(check_variables, "wrong", NCCL_SOCKET_IFNAME="lo").what == "lo: lo is down"


def test_variables_that_do_no_harm_are_left_alone(tmp_path: Path) -> None:
    harmless = {"http_proxy": "http://proxy", "no_proxy": "localhost", "NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "0"}
    assert only(check_variables, "ok", **harmless).what.endswith("NCCL_DEBUG, NCCL_P2P_DISABLE")
    (tmp_path / "libnccl.so.2").touch()
    assert str(tmp_path) in only(check_variables, "unsure", LD_LIBRARY_PATH=f":{tmp_path}").what


# Devices. The driver's own program is played by a script where there is no driver.


def _driver(folder: Path, *lines: str, code: int = 0) -> dict[str, str]:
    """An environment in which nvidia-smi prints these lines."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    said = "\n".join(lines)
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {code}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def _gpu(index: int, used_mib: int = 0) -> str:
    return f"{index}, GPU-{index}abc, NVIDIA X1, 81920, {used_mib}, 550.1"


def test_visible_devices_without_a_driver_are_wrong(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a driver here")
    nothing = {"PATH": str(tmp_path)}
    assert "there is no driver" in only(check_gpus, "wrong", **nothing, CUDA_VISIBLE_DEVICES="0").what
    assert only(check_gpus, "wrong", "learner.device=cuda", **nothing).name == "gpus"
    assert only(check_gpus, "ok", **nothing, CUDA_VISIBLE_DEVICES="").what == "none"


def test_hidden_and_absent_devices_are_told(tmp_path: Path) -> None:
    driver = _driver(tmp_path / "bin", _gpu(0), _gpu(1))
    cpu = ("learner.device=cpu", "rollout.device=cpu")
    assert only(check_gpus, "unsure", *cpu, **driver, CUDA_VISIBLE_DEVICES="").what == "empty: 2 GPUs are hidden"
    assert only(check_gpus, "wrong", "learner.device=cuda", **driver, CUDA_VISIBLE_DEVICES="")
    assert "no GPU 7 here" in only(check_gpus, "wrong", *cpu, **driver, CUDA_VISIBLE_DEVICES="7").what
    (shown,) = [f for f in found(check_gpus, *cpu, **driver, CUDA_VISIBLE_DEVICES="GPU-1") if f.name == "gpus"]
    assert shown.what == "1 of 2 (NVIDIA X1), driver 550.1"


def test_devices_in_use_are_told(tmp_path: Path) -> None:
    driver = _driver(tmp_path / "bin", _gpu(0, 70000), _gpu(1, 5000), _gpu(2, 3))
    states = {f.name: f.state for f in found(check_gpus, **driver) if f.name.startswith("gpu ")}
    assert states == {"gpu 0": "wrong", "gpu 1": "unsure"}


def test_a_driver_that_fails_is_quoted(tmp_path: Path) -> None:
    driver = _driver(tmp_path / "bin", "Failed to initialize NVML: Driver/library version mismatch", code=18)
    assert "Driver/library version mismatch" in only(check_gpus, "wrong", **driver).what


def test_a_torch_for_cpus_beside_gpus_is_wrong(tmp_path: Path) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    driver = _driver(tmp_path / "bin", _gpu(0))
    assert only(check_gpus, "wrong", **driver).what == "built without CUDA, and 1 GPUs are here"
    assert only(check_gpus, "unsure", "learner.device=cpu", "rollout.device=cpu", **driver).name == "torch"


def test_a_torch_that_cannot_be_imported_is_wrong(tmp_path: Path) -> None:
    assert "torch" in only(check_torch, "ok").name
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    finding = only(check_torch, "wrong", PYTHONPATH=str(tmp_path))
    assert finding.what.endswith("ImportError: libcudart.so.13: cannot open")


def test_what_torch_says_of_its_devices_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of three, one of them broken, the other of a kind that this torch was not built for."""
    devices = (Device("NVIDIA X1", "sm_90", "CUDA error: uncorrectable ECC"), Device("NVIDIA X0", "sm_30", ""))
    seen = TorchSeen(
        version="2.11", cuda="13.0", nccl="2.29", architectures=("sm_90",), devices=devices, without_peers=((0, 1),)
    )

    def probe(situation: Situation, what: str) -> subprocess.CompletedProcess[str] | str:
        if what == "nccl":
            return "not done within 180 s"
        return subprocess.CompletedProcess([], 0, msgspec.json.encode(seen).decode())

    monkeypatch.setattr("areal_rloo.launcher.findings.devices._run_probe", probe)
    every = found(check_torch, **_driver(tmp_path / "bin", _gpu(0), _gpu(1), _gpu(2)))
    told = [(finding.name, finding.state) for finding in every]
    assert told == [
        ("torch", "ok"),
        ("torch", "wrong"),
        ("cuda:0", "wrong"),
        ("cuda:1", "unsure"),
        ("peers", "unsure"),
        ("nccl", "wrong"),
    ]
    assert every[1].what == "sees 2 of 3 GPUs."


def test_a_driver_that_does_not_answer_and_one_that_is_not_in_path_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = _driver(tmp_path / "bin")
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("areal_rloo.launcher.findings.devices._NVIDIA_SMI_S", 0.1)
    assert "nvidia-smi does not answer" in only(check_gpus, "wrong", **driver).what
    monkeypatch.setattr("areal_rloo.launcher.findings.devices._DEVICE_FILES", (tmp_path,))
    assert only(check_gpus, "unsure", PATH=str(tmp_path)).what == "there are GPUs, and no nvidia-smi in PATH"


@pytest.mark.gpu
def test_a_real_gpu_is_seen_and_computes() -> None:
    every = [*findings(None, folder=None, thorough=True)]
    assert not [finding for finding in every if finding.state == "wrong" and finding.name.startswith(("cuda", "torch"))]
    (shown,) = [finding for finding in every if finding.name == "gpus"]
    assert shown.state == "ok"


# All of it.


def test_a_check_that_fails_itself_is_unsure() -> None:
    def check_the_moon(situation: Situation) -> Iterator[Finding]:
        raise ZeroDivisionError("new moon")
        yield

    (finding,) = guarded(check_the_moon, Situation())
    assert (finding.name, finding.state) == ("the moon", "unsure")
    assert finding.what == "could not be checked: ZeroDivisionError: new moon"


def test_a_call_without_an_end_is_given_up_and_an_error_comes_through() -> None:
    with pytest.raises(TimeoutError):
        within(0.01, threading.Event().wait)
    with pytest.raises(ZeroDivisionError):
        within(10.0, lambda: 1 // 0)
    assert within(10.0, lambda: 7) == 7


def test_a_start_ends_with_the_first_wrong_finding(tmp_path: Path) -> None:
    preflight.check(config())
    for overrides, error in ((("model.path=/nowhere/x",), ModelError), (("data.train.task=gsm8x",), UserError)):
        with pytest.raises(error):
            preflight.check(config(*overrides))
    with pytest.raises(
        PreflightError, match=r"run\.folder: .* expected launcher\.min_free_disk_bytes=1000000000000000"
    ):
        preflight.look(config("launcher.min_free_disk_bytes=1000000000000000"), tmp_path / "run")
    preflight.look(config(), tmp_path / "run")
    assert (tmp_path / "run").is_dir()


def test_whoever_only_submits_is_told_nothing_of_this_host() -> None:
    names = {f.name for f in findings(config("wire.port=1"), folder=None, thorough=False, runs_here=False)}
    assert not names & {"wire.port", "gpus", "shared memory", "open files", "memory"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = config(f"wire.port={taken.getsockname()[1]}")
        preflight.check(busy, runs_here=False)
        with pytest.raises(PreflightError, match="is in use"):
            preflight.check(busy)


def test_the_quick_part_takes_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from areal_rloo.config import load_config
from areal_rloo.launcher import doctor
from areal_rloo.launcher.findings import findings
print(len(list(findings(load_config("quickstart.yaml"), folder=Path({str(tmp_path)!r}), thorough=False))) > 10)
print("torch" in sys.modules, "transformers" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


def _doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_rloo.launcher.doctor", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, env=environment)


def test_the_command_ends_with_0_where_nothing_is_wrong(tmp_path: Path) -> None:
    done = _doctor("--config", "quickstart.yaml", "--quick", f"run.folder={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert all(line.startswith(("ok      ", "unsure  ", "        fix: ")) for line in lines)
    assert " ok, 0 wrong, " in last
    assert not (tmp_path / "run").exists()


def test_the_command_ends_with_2_and_says_the_fix(tmp_path: Path) -> None:
    done = _doctor("--config", "quickstart.yaml", "--quick", "model.path=/nowhere/model", f"run.folder={tmp_path}")
    assert (done.returncode, done.stderr) == (2, "")
    lines = done.stdout.splitlines()
    at = lines.index("wrong   model.path: /nowhere/model: no such folder")
    assert lines[at + 1] == "        fix: expected a model folder, a hub name (org/name), or tiny"
    assert ", 1 wrong, " in lines[-1]


def test_json_is_one_object(tmp_path: Path) -> None:
    done = _doctor("--config", "quickstart.yaml", "--json", "model.path=/nowhere", f"run.folder={tmp_path}")
    said = json.loads(done.stdout)
    assert done.returncode == 2
    assert said["counts"]["wrong"] == 1
    assert {"name", "state", "what", "fix"} == set(said["findings"][0])
    assert {"torch", "host name"} <= {finding["name"] for finding in said["findings"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quick", "--config", "nope.yaml"], "nope.yaml: no such config file"),
        (["--quick", "--config", "quickstart.yaml", "run.nane=x"], "did you mean 'name'?"),
        (["--quick", "--config", "quickstart.yaml", "run.entry=no.py"], "run.entry: no.py cannot be imported"),
        (["--quick", "run.name=x"], "argument 'run.name=x'"),
        (["--quick", "--fast"], "argument '--fast'"),
        (["--reach", "host"], "--reach host: expected a port"),
        (["--listen", "99999"], "--listen 99999: expected a port"),
        (["--listen", "203.0.113.7:0"], "--listen 203.0.113.7:0: "),
    ],
)
def test_a_mistake_on_the_command_line_is_a_finding_too(arguments: list[str], words: str) -> None:
    done = _doctor(*arguments)
    assert (done.returncode, done.stderr) == (2, "")
    assert words in done.stdout
