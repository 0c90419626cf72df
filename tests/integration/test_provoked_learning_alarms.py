"""The alarms about learning fire in real runs whose config, reward or episode is at fault, and so do the symptoms.

The minutes of the rules are seconds. The runs of a test share a Prometheus.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.local_runs import Run
from support.prometheus import assert_a_silent_end, prometheus, sooner

pytestmark = [
    *(pytest.mark.slow, pytest.mark.rare),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed here"),
]

USER = """
import asyncio
import random
import time
from pathlib import Path

import msgspec
import psutil

from areal_rloo.rollout.episode import Conversation, SingleTurn

def noise(completion_ids):
    return float(sum(completion_ids) % 2)

def huge(completion_ids):
    return 1e12 * noise(completion_ids)

def slow(completion_ids):
    time.sleep(0.5)
    return noise(completion_ids)

async def later(completion_ids):
    await asyncio.sleep(0.5)
    return noise(completion_ids)

def unsteady(completion_ids):
    # Fails now and then, then mostly on the host of a worker, until all is mended.
    if not has("mended"):
        share = 0.9 if has("broken host") and "--worker-id=rollout-1" in commands() else 0.15
        if random.random() < share:
            raise RuntimeError("now and then")
    return noise(completion_ids)

def has(name):
    return Path(__file__).with_name(name).exists()

def commands():
    return [word for parent in psutil.Process().parents() for word in parent.cmdline()]

class Late:
    # Every fourth group waits for two train steps after a long turn.
    def __init__(self, config):
        self.records = Path(config.run.folder) / "metrics.jsonl"

    async def run(self, sample, engine, rewards, chat):
        is_late = sample.sample_id[0] % 4 == 0
        conversation = Conversation(sample.prompt_tokens)
        conversation.add(await engine.generate(conversation.tokens, max_new_tokens=20 if is_late else 1))
        while is_late and self.num_steps() < conversation.last.versions[-1] + 2:
            await asyncio.sleep(0.05)
        conversation.add_others([5])
        conversation.add(await engine.generate(conversation.tokens, max_new_tokens=1))
        return [conversation.trajectory(sample, await rewards.score(conversation.request(sample, chat)))]

    def num_steps(self):
        return self.records.read_bytes().count(b'"kind":"train"') if self.records.exists() else 0

class Wrong(SingleTurn):
    # The logprobs are of no policy, so a weight of a token becomes e^20.
    def __init__(self, config):
        pass

    async def run(self, *arguments):
        (made,) = await super().run(*arguments)
        wrong = msgspec.structs.replace(made.completion, behaviour_logprobs=made.completion.behaviour_logprobs - 1000)
        return [msgspec.structs.replace(made, completion=wrong)]
"""
ENDLESS = ("learner.num_train_steps=100000", "evaluation.every_n_versions=0", "data.eval=null")
MANY = "learner.groups_per_step=25"  # so a few steps have 100 groups


@pytest.fixture
def user(tmp_path: Path) -> Path:
    path = tmp_path / "user.py"
    path.write_text(USER)
    return path


@pytest.mark.parametrize(
    ("options", "alarms", "symptoms"),
    [
        pytest.param(
            {
                "masked": (MANY, "algorithm.loss.behaviour_weight={{rule: mask, lower: 2.0, upper: 5.0}}"),
                "narrow": (MANY, "rollout.sampling.top_k=5", "rollout.sampling.allow_truncated=true"),
                "fast": ("learner.optimizer.learning_rate=1.0",),
            },
            {
                "masked": {"BehaviourWeightLimited", "Unhealthy"},
                "narrow": {"TrainInferenceMismatch", "Unhealthy"},
                "fast": {"PolicyFarFromBehaviour"},
            },
            {"masked": {"no_gradient"}, "narrow": {"mismatch"}},
            id="weights",
        ),
        pytest.param(
            {
                "late": (MANY, "rollout.episode.type={user}:Late", "rollout.num_slots=64"),
                "wrong": (
                    *("rollout.episode.type={user}:Wrong", "data.train.rewards=[{{function: {user}:huge}}]"),
                    *("algorithm.loss.behaviour_weight={{rule: none}}", "learner.max_skipped_steps=100000"),
                ),
                "idle": ("rollout.num_workers=2", "learner.microbatch_tokens=64"),
            },
            {"late": {"TokensPastTheBound", "Unhealthy"}, "wrong": {"StepsSkipped"}, "idle": {"RolloutIdle"}},
            {"late": {"stale"}},
            id="steps",
        ),
        pytest.param(
            {
                "slow": ("data.train.rewards=[{{function: {user}:slow}}]",),
                "later": ("data.train.rewards=[{{function: {user}:later}}]", "rollout.num_async_rewards=2"),
                "starved": ("rollout.num_slots=1", "rollout.sampling.max_new_tokens=100"),
            },
            {"slow": {"RewardsSaturated"}, "later": {"RewardsSaturated"}, "starved": {"LearnerStarved"}},
            {},
            id="halves",
        ),
    ],
)
def test_each_trouble_of_learning_fires_its_alarm(
    options: Mapping[str, tuple[str, ...]],
    alarms: Mapping[str, set[str]],
    symptoms: Mapping[str, set[str]],
    user: Path,
    start: Callable[..., Run],
    tmp_path: Path,
) -> None:
    reward = f"data.train.rewards=[{{function: {user}:noise}}]"
    runs = {
        name: start(*ENDLESS, reward, *(option.format(user=user) for option in own), name=name)
        for name, own in options.items()
    }
    with prometheus(tmp_path, tmp_path / "targets", rules=sooner) as server:
        missing = {name: set(expected) for name, expected in alarms.items()}

        def all_have_fired() -> bool:
            for name, left in missing.items():
                left.difference_update(server.alarms(name))
            return not any(missing.values())

        runs[next(iter(runs))].wait_for(all_have_fired)
        for name, expected in symptoms.items():
            runs[name].wait_for(lambda name=name, expected=expected: expected <= server.symptoms(name))  # type: ignore[misc]
        assert_a_silent_end(server, *runs.values())


def test_rewards_that_fail_fire_alarms_until_they_are_mended(
    user: Path, start: Callable[..., Run], tmp_path: Path
) -> None:
    rewards = f"rewards=[{{function: {user}:unsteady}}]"
    run = start(
        *(f"data.train.{rewards}", f"data.eval.{rewards}", "data.eval.num_prompts=40", "evaluation.every_n_versions=1"),
        *("learner.num_train_steps=100000", "rollout.num_workers=2", "rollout.max_reward_failure_share=0.4"),
    )
    with prometheus(tmp_path, tmp_path / "targets", rules=sooner) as server:
        run.wait_for(lambda: {"SamplesDropped", "EvaluationSamplesFailed"} <= server.alarms())
        user.with_name("broken host").touch()
        run.wait_for(lambda: "WorkerSetAside" in server.alarms())
        user.with_name("mended").touch()
        ends = {"SamplesDropped", "EvaluationSamplesFailed", "WorkerSetAside"}
        run.wait_for(lambda: not ends & server.alarms())
        assert_a_silent_end(server, run)
