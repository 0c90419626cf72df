"""The GPUs that a process sees: memory and use, as the driver counts them."""

import logging

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.nvml import MIB, play_driver

from areal_rloo.telemetry.gpus import Gpus, GpuStatistics
from areal_rloo.telemetry.metrics import watch


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        *((None, "012"), ("0,2", "02"), (" 1 ", "1"), ("GPU-2abc", "2"), ("GPU-1", "1")),
        *(("", ""), ("-1", ""), ("7", ""), ("0,-1,1", "0"), ("G", ""), ("MIG-GPU-0abc/1/0", "")),
    ],
)
def test_a_process_counts_the_gpus_it_sees(monkeypatch: pytest.MonkeyPatch, chosen: str | None, seen: str) -> None:
    play_driver(monkeypatch, 100, 200, 300)
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    statistics = Gpus().statistics()
    assert statistics.used_bytes == {index: 100 * (int(index) + 1) * MIB for index in seen}
    assert statistics.total_bytes == dict.fromkeys(seen, 81920 * MIB)
    assert statistics.busy_share == pytest.approx({index: 0.1 * (int(index) + 1) for index in seen})


def test_an_old_driver_and_a_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(handle: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    play_driver(monkeypatch, 100, before_510=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", unsupported)
    assert Gpus().statistics() == GpuStatistics(
        used_bytes={"0": 100 * MIB}, total_bytes={"0": 81920 * MIB}, busy_share={}
    )


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_without_a_driver_there_is_nothing_to_count(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    play_driver(monkeypatch, error=error)
    assert Gpus().statistics().used_bytes == {}


def test_a_driver_that_fails_costs_these_metrics_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    play_driver(monkeypatch, error=pynvml.NVML_ERROR_UNKNOWN)
    registry = CollectorRegistry()
    watch(registry, GpuStatistics, Gpus().statistics)
    with caplog.at_level(logging.ERROR):
        assert b"used_bytes{" not in generate_latest(registry)
    assert "GpuStatistics cannot be read" in caplog.text
