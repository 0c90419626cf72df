"""A whole run on GSM8K with a managed server of each kind."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_runs import Run, balanced
from support.server_support import SERVERS, server_processes
from support.stages import command

from areal_rloo.telemetry.trajectories import read_trajectories

pytestmark = pytest.mark.full


def _low_reward(folder: Path) -> Path:
    """Write a reward for half of the vocabulary, which random weights meet in part."""
    reward = folder / "reward.py"
    reward.write_text(
        "def low(completion_ids: list[int]) -> float:\n"
        "    return sum(token < 129 for token in completion_ids) / len(completion_ids)\n"
    )
    return reward


@pytest.mark.parametrize("kind", SERVERS)
def test_gsm8k_trains_on_a_managed_server(
    kind: str, start: Callable[..., Run], gsm8k_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server spawns its processes, as the server of a user does."""
    monkeypatch.delenv(f"AREAL_RLOO_{kind.upper()}_FORKS")
    run = start(
        *(f"rollout.engine={kind}", f"rollout.{kind}.python={SERVERS[kind].python()}", "rollout.num_workers=1"),
        *("model.tiny.hidden_size=64", "model.tiny.num_heads=2", "model.tiny.num_kv_heads=2"),  # vLLM needs heads of 32
        *(f"data.train.path={gsm8k_folder / 'train.jsonl'}", "data.max_prompt_tokens=1600"),
        *("model.path=tiny", "model.dtype=float32", "rollout.num_slots=8", "learner.optimizer.learning_rate=0.01"),
        *("learner.num_train_steps=4", "learner.microbatch_tokens=4096", "learner.num_minibatches=1"),
        config="gsm8k_rloo.yaml",
    )
    code, output = run.wait()
    assert code == 0, output
    ledger = run.summary()["ledger"]
    assert run.summary()["num_train_steps"] == 4
    assert balanced(ledger)
    assert ledger["dropped"].keys() <= {"stale"}, "a slow machine; the prompts come again"
    assert ledger["trained"] == 4 * 4 * 4
    assert server_processes(run.folder / "logs" / f"rollout-0.{kind}.log") == []


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_evaluates_a_checkpoint_as_our_engine_does(
    kind: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    """Greedy, so both write the same tokens."""
    heads = ("model.tiny.hidden_size=64", "model.tiny.num_heads=2", "model.tiny.num_kv_heads=2")  # vLLM: heads of 32
    run = start("learner.num_train_steps=2", "model.dtype=float32", *heads)
    code, output = run.wait()
    assert code == 0, output
    server = (f"rollout.engine={kind}", f"rollout.{kind}.python={SERVERS[kind].python()}")
    written = []
    for name, options in (("ours", ()), ("server", server)):
        command("evaluate", run.folder, *options, "--output", name, folder=tmp_path)
        samples = read_trajectories(tmp_path / name / "trajectories.jsonl")
        written.append(sorted((sample.item_index, *sample.token_ids) for sample in samples))
    assert len(written[0]) == 8
    assert written[0] == written[1]


@pytest.mark.parametrize(("kind", "transport"), [("sglang", "collective"), ("vllm", "auto")])
def test_a_server_trains_with_adapters_that_the_worker_merges(
    kind: str, transport: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    """Without staleness, each token compares the merged weights with those of the learner."""
    pytest.importorskip("peft", reason="the extra peft is not installed")
    run = start(
        *(f"rollout.engine={kind}", f"rollout.{kind}.python={SERVERS[kind].python()}", "rollout.num_workers=1"),
        *("model.tiny.hidden_size=64", "model.tiny.num_heads=2", "model.tiny.num_kv_heads=2"),  # vLLM needs heads of 32
        *("learner.lora={rank: 8, publish: adapters}", "learner.optimizer.learning_rate=0.01"),
        *(f"data.train.rewards=[{{function: '{_low_reward(tmp_path)}:low'}}]", "algorithm.max_staleness=0"),
        f"weights.transport={transport}",
        *("data.eval=null", "evaluation.every_n_versions=0", "checkpoint.every_n_steps=0", "learner.num_train_steps=6"),
    )
    code, output = run.wait()
    assert code == 0, output
    records = run.records()
    assert max(record.mismatch_abs_mean for record in records) < 1e-4, "the server has other weights"
    assert abs(records[-1].lora_lost_share) < 1e-3, "the adapters have changed, and float32 loses nothing"
    assert balanced(run.summary()["ledger"])


@pytest.mark.parametrize("way", ["never", pytest.param("in_turns", marks=pytest.mark.rare)])
@pytest.mark.parametrize("kind", SERVERS)
def test_a_policy_learns_from_the_samples_of_a_server(
    kind: str, way: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    """A random model learns to prefer half of the vocabulary. Samples of other weights than tagged teach nothing."""
    reward = _low_reward(tmp_path)
    run = start(
        *(f"rollout.engine={kind}", f"rollout.{kind}.python={SERVERS[kind].python()}"),
        *("model.tiny.hidden_size=64", "model.tiny.num_heads=2", "model.tiny.num_kv_heads=2"),  # vLLM needs heads of 32
        *(f"data.train.rewards=[{{function: '{reward}:low'}}]", f"rollout.share_devices={way}"),
        *("data.eval=null", "evaluation.every_n_versions=0", "checkpoint.every_n_steps=0"),
        *("learner.optimizer.learning_rate=0.003", "learner.num_train_steps=25", "algorithm.group_size=8"),
    )
    code, output = run.wait()
    assert code == 0, output
    rewards = [record.reward_mean for record in run.records()]
    assert sum(rewards[:3]) / 3 < 0.6
    assert sum(rewards[-3:]) / 3 > 0.7, rewards
