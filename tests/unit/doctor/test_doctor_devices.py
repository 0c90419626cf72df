"""Devices. The driver's own program is played by a script where there is no driver."""

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from situations import found, only

from areal_rloo.launcher.findings import Situation, findings
from areal_rloo.launcher.findings.devices import Device, TorchSeen, check_gpus, check_torch


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
