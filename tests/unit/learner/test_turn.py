"""The memory that the learner frees at the end of a turn, and the effect on the next step: none."""

from pathlib import Path

import torch
from prometheus_client import CollectorRegistry, generate_latest
from support.one_rank import one_rank
from support.train_steps import VERSION, ragged_groups, step_config

from areal_rloo.config import load_config
from areal_rloo.intake.fleet import Fleet
from areal_rloo.learner.turn import turn_of_learner


class _Intake:
    """The part of the intake's service that a turn needs: the workers."""

    def __init__(self) -> None:
        self.fleet = Fleet(most_samples=8)


def test_steps_with_turns_give_the_same_weights(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    config = step_config("rollout.share_devices=in_turns")
    with_turns, without = (one_rank(tiny_folders["qwen2"], config) for _ in range(2))
    registry, intake = CollectorRegistry(), _Intake()
    turn = turn_of_learner(config, tmp_path, with_turns.team, intake, registry)  # type: ignore[arg-type]
    for seed in range(3):
        groups = ragged_groups(seed)
        without.step(groups, policy_version=VERSION)
        with turn:
            assert intake.fleet.engines_wait
            with_turns.step(groups, policy_version=VERSION)
            assert any(parameter.grad is not None for parameter in with_turns.team.own.policy.parameters())
        assert not intake.fleet.engines_wait
        assert all(parameter.grad is None for parameter in with_turns.team.own.policy.parameters())
    for one, other in zip(with_turns.team.own.policy.parameters(), without.team.own.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    assert b"areal_rloo_turn_taken_total 3.0" in generate_latest(registry)
    turn.close()  # type: ignore[attr-defined]


def test_without_turns_a_step_waits_for_no_engine(tmp_path: Path) -> None:
    config, registry, intake = load_config("quickstart.yaml"), CollectorRegistry(), _Intake()
    with turn_of_learner(config, tmp_path, None, intake, registry):  # type: ignore[arg-type]
        assert not intake.fleet.engines_wait
    assert generate_latest(registry) == b""
