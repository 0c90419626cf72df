"""Checks of GPUs, with an NVIDIA driver of our making."""

from pathlib import Path

import msgspec
import pynvml
import pytest
from support.nvml import play_driver
from support.situations import found, only

from areal_rloo.launcher.doctor import Situation, findings
from areal_rloo.launcher.doctor.devices import Device, TorchSeen, check_gpus, check_torch


def test_visible_devices_without_a_driver_are_wrong() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a driver here")
    assert "there is no driver" in only(check_gpus, "wrong", CUDA_VISIBLE_DEVICES="0").what
    assert only(check_gpus, "wrong", "learner.device=cuda").name == "gpus"
    assert only(check_gpus, "ok", CUDA_VISIBLE_DEVICES="").what == "none"


def test_hidden_and_absent_devices_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, 0, 0)
    cpu = ("learner.device=cpu", "rollout.device=cpu")
    assert only(check_gpus, "unsure", *cpu, CUDA_VISIBLE_DEVICES="").what == "empty: 2 GPUs are hidden"
    assert only(check_gpus, "wrong", "learner.device=cuda", CUDA_VISIBLE_DEVICES="")
    assert "no GPU 7 here" in only(check_gpus, "wrong", *cpu, CUDA_VISIBLE_DEVICES="7").what
    (shown,) = [f for f in found(check_gpus, *cpu, CUDA_VISIBLE_DEVICES="GPU-1") if f.name == "gpus"]
    assert shown.what == "1 of 2 (NVIDIA X1), driver 550.1"


def test_devices_in_use_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, 70000, 5000, 3)
    states = {f.name: f.state for f in found(check_gpus) if f.name.startswith("gpu ")}
    assert states == {"gpu 0": "wrong", "gpu 1": "unsure"}


def test_the_error_of_a_driver_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert "NVML/RM version mismatch" in only(check_gpus, "wrong").what


def test_a_torch_for_cpus_beside_gpus_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    play_driver(monkeypatch, 0)
    assert only(check_gpus, "wrong").what == "built without CUDA, and 1 GPUs are here"
    assert only(check_gpus, "unsure", "learner.device=cpu", "rollout.device=cpu").name == "torch"


def test_a_torch_that_cannot_be_imported_is_wrong(tmp_path: Path) -> None:
    assert "torch" in only(check_torch, "ok").name
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    finding = only(check_torch, "wrong", PYTHONPATH=str(tmp_path))
    assert finding.what.endswith("ImportError: libcudart.so.13: cannot open")


def test_broken_and_missing_devices_of_torch_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of three, one of them broken, the other of a kind that this torch was not built for."""
    devices = (Device("NVIDIA X1", "sm_90", "CUDA error: uncorrectable ECC"), Device("NVIDIA X0", "sm_30", ""))
    seen = TorchSeen(
        version="2.11", cuda="13.0", nccl="2.29", architectures=("sm_90",), devices=devices, without_peers=((0, 1),)
    )

    def probe(situation: Situation, what: str) -> tuple[bool, str]:
        return (False, "not done within 180 s") if what == "nccl" else (True, msgspec.json.encode(seen).decode())

    monkeypatch.setattr("areal_rloo.launcher.doctor.devices._run_probe", probe)
    play_driver(monkeypatch, 0, 0, 0)
    every = found(check_torch)
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


def test_a_driver_that_hangs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, hangs=True)
    monkeypatch.setattr("areal_rloo.launcher.hosts._DRIVER_TIMEOUT_S", 0.1)
    assert "the NVIDIA driver does not answer" in only(check_gpus, "wrong").what


def test_gpus_without_the_library_of_the_driver_are_unsure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play_driver(monkeypatch, error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr("areal_rloo.launcher.doctor.devices._DEVICE_FILES", (tmp_path,))
    assert only(check_gpus, "unsure").what == "there are GPUs, but no libnvidia-ml.so.1 with a loaded driver"


@pytest.mark.gpu
def test_a_real_gpu_is_seen_and_computes() -> None:
    every = [*findings(None, folder=None, thorough=True)]
    assert not [finding for finding in every if finding.state == "wrong" and finding.name.startswith(("cuda", "torch"))]
    (shown,) = [finding for finding in every if finding.name == "gpus"]
    assert shown.state == "ok"
