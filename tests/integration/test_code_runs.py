"""A tiny model learns to write programs: the reward of a whole run rises, and each program ran in the sandbox."""

import json
import random
from pathlib import Path
from statistics import mean

import pytest
import torch
from support.local_runs import Run

from areal_rloo.config import TinyModelConfig, WarmStartConfig
from areal_rloo.errors import PreflightError
from areal_rloo.learner.demonstrations import Example, train_on_demonstrations
from areal_rloo.models.tiny import make_tiny_model, save_tiny_model
from areal_rloo.tasks.tools.landlock import landlock_version

pytestmark = [pytest.mark.slow, pytest.mark.rare]  # tests/unit/tasks/code tries the parts

NUMBERS = range(4)
FEW = (
    *("learner.num_train_steps=16", "learner.groups_per_step=6", "algorithm.group_size=8", "learner.num_threads=1"),
    *("learner.optimizer={learning_rate: 2e-3, schedule: constant}", "rollout.num_threads=1"),
    *("data.eval=null", "evaluation.every_n_versions=0"),
)


def _example(number: int, printed: int) -> Example:
    return f"{number}\n", f"print({printed})"


def _save_a_beginner(folder: Path) -> None:
    """Save a model that writes programs, of which many print a wrong number."""
    recipe = TinyModelConfig(hidden_size=48, num_layers=2, warm_start=None)
    model, rng = make_tiny_model(recipe), random.Random(0)

    def draw(num: int) -> list[Example]:
        return [
            _example(number, number if rng.random() < 0.3 else rng.choice(NUMBERS))
            for number in rng.choices(NUMBERS, k=num)
        ]

    start = WarmStartConfig(keep_accuracy=1.0, until_accuracy=1.0, max_steps=600)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads of so small a model only wait for each other
    train_on_demonstrations(model, start, draw, [_example(number, number) for number in NUMBERS])
    torch.set_num_threads(num_threads)
    folder.mkdir()
    save_tiny_model(model, folder)


def test_the_reward_of_programs_rises(tmp_path: Path) -> None:
    try:
        landlock_version()
    except PreflightError as error:
        pytest.skip(str(error))
    _save_a_beginner(tmp_path / "model")
    rows = tmp_path / "numbers.jsonl"
    tests = {number: json.dumps({"inputs": [""], "outputs": [f"{number}\n"]}) for number in NUMBERS}
    lines = [json.dumps({"question": _example(n, n)[0], "input_output": tests[n]}) for n in NUMBERS]
    rows.write_text("\n".join(lines))
    train = f"data.train={{task: code, path: {rows}, parameters: {{instruction: false}}}}"
    run = Run(tmp_path / "run", train, f"model.path={tmp_path / 'model'}", *FEW)
    code, output = run.wait()
    assert code == 0, output
    rewards = [record.reward_mean for record in run.records()]
    assert mean(rewards[8:]) - mean(rewards[:4]) >= 0.15, rewards
    assert not run.summary()["ledger"]["dropped"].keys() - {"stale"}
