"""The engine of `benchmarks.lora` takes the weights of each way, and closer weights have a smaller mismatch."""

from pathlib import Path

import pytest

from benchmarks import lora

pytest.importorskip("peft", reason="the extra peft is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    lora._save_model(folder, 0)
    return folder


@pytest.mark.parametrize("way", ["apart", "nearest", "stochastic"])
def test_an_engine_with_the_adapters_is_closer_than_one_without(folder: Path, way: str) -> None:
    causal = lora._adapted(str(folder), 1e-2, 0)
    requests = lora._requests(4, 16)
    mismatch = {
        one: lora._mismatch(str(folder), causal, requests, lora.WAYS[one](causal), apart=one == "apart")
        for one in (way, "none")
    }
    assert mismatch[way] < 0.7 * mismatch["none"]
