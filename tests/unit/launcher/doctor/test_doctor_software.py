"""Python, packages and variables of the environment, each made to fail."""

import sys
from pathlib import Path

import pytest
from support.situations import found, only

from areal_rloo.errors import install
from areal_rloo.launcher.doctor.software import check_extras, check_packages, check_python, check_variables


def test_an_old_python_or_package_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    monkeypatch.setattr("areal_rloo.launcher.doctor.software._DISTRIBUTION", "nobody-has-this")
    assert "is not installed in" in only(check_packages, "unsure").what


def test_an_option_whose_package_is_absent_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for option, package, extra in (("lora={rank: 4}", "peft", "peft"), ("kernels=liger", "liger_kernel", "liger")):
        absent = only(check_extras, "wrong", f"learner.{option}")
        assert (absent.what, absent.fix) == (f"{package} is not installed", install(extra))
    absent = only(check_extras, "wrong", "telemetry.trackers=[wandb]")
    assert (absent.name, absent.what, absent.fix) == ("telemetry.trackers", "wandb is not installed", install("wandb"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert found(check_extras, "learner.lora={rank: 4}", "learner.kernels=liger") == found(check_extras) == []


def test_kernels_of_a_gpu_without_a_gpu_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for visible, device in (("0", "cpu"), ("", "auto")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        said = only(check_extras, "wrong", "learner.kernels=liger", f"learner.device={device}")
        assert said.what == "expected torch on a CPU, got liger, whose kernels need a GPU"


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
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "unsure", "waits forever"),
        ("http_proxy", "http://proxy:3128", "unsure", "through a proxy"),
    ],
)
def test_a_harmful_variable_is_reported(variable: str, value: str, state: str, words: str) -> None:
    finding = only(check_variables, state, **{variable: value})
    assert finding.name == variable
    assert words in finding.what
    assert variable in finding.fix or "no_proxy" in finding.fix


def test_an_interface_that_is_down_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "operstate").write_text("down\n")
    monkeypatch.setattr("areal_rloo.launcher.doctor.software._INTERFACES", tmp_path)
    assert only(check_variables, "wrong", NCCL_SOCKET_IFNAME="lo").what == "lo: lo is down"


def test_harmless_variables_are_not_reported(tmp_path: Path) -> None:
    harmless = {"http_proxy": "http://proxy", "no_proxy": "localhost", "NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "0"}
    assert only(check_variables, "ok", **harmless).what.endswith("NCCL_DEBUG, NCCL_P2P_DISABLE")
    (tmp_path / "libnccl.so.2").touch()
    assert str(tmp_path) in only(check_variables, "unsure", LD_LIBRARY_PATH=f":{tmp_path}").what
