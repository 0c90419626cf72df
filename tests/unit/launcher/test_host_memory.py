"""The memory of a host against the tensors of a learner, and against sums by hand."""

from pathlib import Path

import pytest
from support.checkpoints import trained

from areal_rloo.config import Config, load_config
from areal_rloo.launcher.fit import planned
from areal_rloo.launcher.host_memory import host_parts
from areal_rloo.launcher.placement import Host, place
from areal_rloo.learner.memory import GIB, estimate
from areal_rloo.models.sizes import SHIPPED, Sizes

SMALL = SHIPPED["Qwen/Qwen2.5-1.5B-Instruct"]
P = SMALL.num_parameters


def _parts(config: Config, gpus: int, model: Sizes | None = SMALL, num: int = P, hosts: int = 1) -> dict[str, float]:
    ids = tuple(map(str, range(gpus)))
    there = [Host(f"n{index}", "10.0.0.1", 32, ids, 512 * GIB, 140 * 10**9) for index in range(hosts)]
    found = planned(config, there, model)
    return host_parts(found, place(found, there), model, num)


def _of(*overrides: str, gpus: int = 4, hosts: int = 1) -> dict[str, float]:
    return _parts(load_config("gsm8k_rloo.yaml", ["learner.num_ranks=2", *overrides]), gpus, hosts=hosts)


@pytest.mark.parametrize(
    ("overrides", "learner", "copied"),
    [
        ((), 0, 12 + 2),
        (("learner.offload=optimizer",), 8, 12 + 2),
        (("learner.offload=parameters",), 16, 4),  # read at the start; a checkpoint gathers only the model
        (("learner.offload=optimizer", "learner.optimizer.state_dtype=bfloat16"), 4, 8 + 2),
        (("learner.offload=optimizer", "learner.num_replicas=2"), 16, 12 + 2),
        (("algorithm.kl.coefficient=0.1", "model.reference={path: initial, offload: true}"), 4, 12 + 2),
        (("algorithm.kl.coefficient=0.1", "model.reference={path: initial, refresh_every_n_versions: 2}"), 0, 16 + 2),
    ],
)
def test_the_host_of_a_gpu_has_offloaded_states_and_copies(
    overrides: tuple[str, ...], learner: int, copied: int
) -> None:
    parts = _of("rollout.engine=sglang", *overrides)
    assert parts.pop("learner", 0) == learner * P
    assert parts == {"loads and checkpoints": copied * P, "versions of the weights": 2 * 2 * P}


def test_the_host_with_the_most_is_counted() -> None:
    """Of three ranks, two are on the first host, with two thirds of the states and with the model to write."""
    parts = _of("rollout.engine=sglang", "learner.num_ranks=3", "learner.offload=optimizer", gpus=2, hosts=2)
    assert parts == {
        "learner": pytest.approx(8 * P * 2 / 3),
        "loads and checkpoints": pytest.approx(8 * P + 2 * P),
        "versions of the weights": 2 * 2 * P,
    }


def test_every_rank_of_a_cpu_has_rows_of_its_own() -> None:
    config = load_config("gsm8k_rloo.yaml", ["rollout.engine=embedded", "learner.num_ranks=2", "rollout.num_workers=3"])
    parts = _parts(config, 0)
    found = planned(config, [Host("n", "10.0.0.1", 32, (), 512 * GIB)], SMALL)
    assert parts == {
        "learner": 2 * sum(estimate(SMALL, found, on_gpu=False).values()),
        "loads and checkpoints": 4 * P,
        "engines": 3 * 2 * 2 * P,
        "versions of the weights": 2 * 2 * P,
    }


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("learner.optimizer.state_dtype=bfloat16",),
        ("algorithm.kl.coefficient=0.1", "model.reference={path: initial, refresh_every_n_versions: 2}"),
    ],
)
def test_the_copy_for_a_checkpoint_is_that_of_the_states(
    tiny_folders: dict[str, Path], overrides: tuple[str, ...]
) -> None:
    """The states of a rank on a CPU here are those of a rank on a GPU."""
    team = trained(tiny_folders["llama"], *overrides)
    states = sum(tensor.nbytes for name, tensor in team.own.state().items() if not name.startswith("random."))
    sizes = Sizes.of(team.own.policy.causal.config.to_dict())
    num = sum(parameter.numel() for parameter in team.own.policy.parameters())
    copied = _parts(load_config("quickstart.yaml", overrides), 2, sizes, num)["loads and checkpoints"]
    assert copied - 4 * num == pytest.approx(states, rel=0.001), "beside the states: the model in float32"
