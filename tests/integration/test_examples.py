"""Run every example with the command of the docstring, shortened to a few steps."""

import ast
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_runs import with_last_values

from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord
from areal_rloo.telemetry.trajectories import FILE_NAME, TrajectoryRecord, read_trajectories

REPO = Path(__file__).resolve().parents[2]
TINY = ["model.tiny.warm_start=null", "model.tiny.hidden_size=48", "model.tiny.num_layers=2"]
SHORT = [
    *TINY,
    "rollout.sampling.max_new_tokens=48",
    "data.eval.num_prompts=4",
    "algorithm.group_size=4",
    "learner.groups_per_step=4",
    "learner.num_train_steps=3",
    "rollout.num_reward_workers=1",
]

pytestmark = pytest.mark.slow


def command_of(example: str) -> list[str]:
    """Return the command in the docstring of an example."""
    docstring = ast.get_docstring(ast.parse((REPO / "examples" / example).read_text())) or ""
    _, _, rest = docstring.partition("    python ")
    lines = rest.split("\n")
    command = lines[0]
    while command.endswith("\\"):
        command = command[:-1] + lines.pop(1).strip()
    return shlex.split(command)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the tiny model once in a temporary cache instead of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREAL_RLOO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def run(example: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *with_last_values(*command_of(example), *arguments)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def records(folder: Path) -> list[TrainRecord]:
    return [record for record in read_records(folder / "metrics.jsonl") if isinstance(record, TrainRecord)]


def trajectories(folder: Path) -> list[TrajectoryRecord]:
    return list(read_trajectories(folder / FILE_NAME))


def test_custom_reward(tmp_path: Path) -> None:
    run("custom_reward.py", f"run.folder={tmp_path}", *SHORT)
    for record in records(tmp_path):
        assert record.reward_parts.keys() == {"arithmetic", "brevity"}
        expected = record.reward_parts["arithmetic"] + 0.3 * record.reward_parts["brevity"]
        assert record.reward_mean == pytest.approx(expected)


def test_rewards_of_turns_and_an_async_reward(tmp_path: Path) -> None:
    """The two other functions of custom_reward.py."""
    rewards = "[{function: examples/custom_reward.py:steps}, {function: examples/custom_reward.py:judged}]"
    run("custom_reward.py", f"run.folder={tmp_path}", *SHORT, f"data.train.rewards={rewards}",
        "algorithm.preset=reinforce_plus_plus", "algorithm.returns=token", "algorithm.adv_norm.over=tokens",
    )  # fmt: skip
    assert records(tmp_path)[-1].reward_parts.keys() == {"steps", "judged"}


def test_custom_task(tmp_path: Path) -> None:
    run("custom_task.py", f"run.folder={tmp_path}", *SHORT)
    assert len(records(tmp_path)) == 3
    assert {t.source for t in trajectories(tmp_path)} == {"ShortSums"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {evaluation["name"] for evaluation in summary["evaluation"]} == {"ShortSums"}


def test_multi_turn(tmp_path: Path) -> None:
    stops = [
        # A random model hardly ever ends a turn by itself; this one is taught to.
        "model.tiny.warm_start={until_accuracy: 0.01, max_steps: 40}",
        "model.tiny.hidden_size=96",
        "learner.num_train_steps=2",
    ]
    run("multi_turn.py", f"run.folder={tmp_path}", *SHORT, *stops)
    several = [t for t in trajectories(tmp_path) if t.spans]
    assert several
    for trajectory in several:
        others = [token.text for token in trajectory.tokens() if not token.by_policy]
        assert "=?" in "".join(others)


def test_tool_use(tmp_path: Path) -> None:
    run("tool_use.py", f"run.folder={tmp_path / 'run'}", f"model.path={tmp_path / 'model'}",
        "--demonstrations=100", "learner.num_train_steps=2", "learner.groups_per_step=2", "algorithm.group_size=4",
        "data.eval.num_prompts=2", "model.tiny.hidden_size=96", "model.tiny.num_layers=2", "model.tiny.warm_start=null",
        "rollout.sampling.max_new_tokens=48",
    )  # fmt: skip
    assert len(records(tmp_path / "run")) == 2
    written = trajectories(tmp_path / "run")
    assert all("calculator(expression)" in t.prompt for t in written)
    called = [t for t in written if t.spans]
    assert called, "after so many demonstrations it calls, if not always rightly"
    for trajectory in called:
        tokens = list(trajectory.tokens())
        by_policy, by_others = ("".join(t.text for t in tokens if t.by_policy == whose) for whose in (True, False))
        assert "<tool_call>" in by_policy and "<tool_response>" not in by_policy
        assert "<tool_response>" in by_others


def test_openai_agent(tmp_path: Path) -> None:
    run("openai_agent.py", f"run.folder={tmp_path}", *SHORT, "rollout.sampling.max_new_tokens=24")
    assert len(records(tmp_path)) == 3
    assert all(t.prompt.endswith("=?\n") for t in trajectories(tmp_path))


def test_one_file_rloo() -> None:
    out = run("one_file_rloo.py", "--num-steps=1", "--groups-per-step=2", "--group-size=2", "--num-eval-prompts=2",
        *TINY, "rollout.sampling.max_new_tokens=24",
    )  # fmt: skip
    assert "greedy accuracy after" in out


def test_every_example_has_a_test() -> None:
    tested = {name.removeprefix("test_") + ".py" for name in globals() if name.startswith("test_")}
    assert {path.name for path in (REPO / "examples").glob("*.py")} <= tested
