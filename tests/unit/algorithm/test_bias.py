"""Which expected gradients are exact on stale tokens: the benchmark of docs/algorithms.md, on fewer problems."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def bias() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location("bias", BENCHMARKS / "bias.py")
        assert spec is not None and spec.loader is not None, "the file of the benchmark is there"
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "bias", module)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize("seed", range(3))
def test_only_the_product_over_a_sequence_corrects_stale_tokens_exactly(bias: ModuleType, seed: int) -> None:
    fresh, stale = (bias.Problem.random(seed, distance) for distance in (0.0, 0.05))
    for name, config in bias.LOSSES.items():
        assert bias.compare_correction(fresh, config)["error"] < 1e-12
        error = bias.compare_correction(stale, config)["error"]
        assert error < 1e-12 if name == "sequence, product" else error > 0.1


@pytest.mark.parametrize("term", [("k2", "weight"), ("k3", "weight"), ("k1", "gradient"), ("k3", "gradient")])
def test_a_corrected_kl_is_exact_if_the_prefix_is_corrected(bias: ModuleType, term: tuple[str, str]) -> None:
    problem = bias.Problem.random(0, 0.05)
    errors: dict[str, Any] = {name: bias.compare_kl(problem, config, *term) for name, config in bias.LOSSES.items()}
    assert errors["sequence, product"]["error"] < 1e-12
    assert errors["token"]["error"] < bias.compare_kl(problem, bias.LOSSES["token"], term[0], "none")["error"]


def test_a_kl_in_the_loss_ignores_what_a_token_does_to_later_ones(bias: ModuleType) -> None:
    compared = bias.compare_placements(bias.Problem.random(0, 0.0))
    assert compared["k1 in the reward"]["error"] < 1e-12
    assert compared["k2 in the loss"]["error"] > 0.3


def test_samples_lost_at_random_bias_nothing_and_others_do(bias: ModuleType) -> None:
    problem = bias.Problem.random(0, 0.0)
    errors = {name: bias.compare_lost(problem, lost)["error"] for name, lost in bias.LOST.items()}
    assert errors.pop("half of all") < 1e-12
    assert min(errors.values()) > 0.05
