"""A fake NVIDIA driver without a GPU: the functions of NVML that the package calls."""

import threading
from types import SimpleNamespace

import pynvml
import pytest

MIB = 2**20


def play_driver(
    monkeypatch: pytest.MonkeyPatch,
    *used_mib: int,
    error: int | None = None,
    hangs: bool = False,
    before_510: bool = False,
) -> None:
    """Let NVML report a GPU for each number of MiB in use, fail with an error, or hang.

    A driver before 510 does not have the second version of the call for memory.
    """

    def initialize() -> None:
        if hangs:
            threading.Event().wait(60.0)
        if error is not None:
            raise pynvml.NVMLError(error)

    def memory(index: int, version: int | None) -> SimpleNamespace:
        if before_510 and version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=81920 * MIB, used=used_mib[index] * MIB)

    for name, function in (
        ("nvmlInit", initialize),
        ("nvmlShutdown", lambda: None),
        ("nvmlSystemGetDriverVersion", lambda: "550.1"),
        ("nvmlDeviceGetCount", lambda: len(used_mib)),
        ("nvmlDeviceGetHandleByIndex", lambda index: index),
        ("nvmlDeviceGetUUID", lambda index: f"GPU-{index}abc"),
        ("nvmlDeviceGetName", lambda index: "NVIDIA X1"),
        ("nvmlDeviceGetMemoryInfo", memory),
        ("nvmlDeviceGetUtilizationRates", lambda index: SimpleNamespace(gpu=10 * (index + 1), memory=0)),
    ):
        monkeypatch.setattr(pynvml, name, function)
