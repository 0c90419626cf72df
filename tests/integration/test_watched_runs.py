"""What a user sees of a run: its health on the terminal, in the log and in the report; and a real Prometheus."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_runs import Run
from support.monitoring import expressions, panels, with_values
from support.patience import eventually
from support.prometheus import prometheus

from areal_rloo.config import load_config
from areal_rloo.telemetry.targets import Targets

pytestmark = pytest.mark.slow

CUT = (
    *("rollout.sampling.max_new_tokens=4", "rollout.sampling.min_new_tokens=4"),
    "rollout.sampling.allow_truncated=true",
)
ZERO = (  # and completions long enough to end
    "data.train.rewards=[{function: examples/custom_reward.py:brevity, weight: 0.0}]",
    *("rollout.sampling.max_new_tokens=64", "learner.microbatch_tokens=4096"),
)
MASKED = "algorithm.rewards.mask_truncated=true"


@pytest.mark.parametrize(
    ("options", "symptoms"),
    [
        (ZERO, {"no_signal"}),
        (CUT, {"no_signal", "truncated"}),
        ((*CUT, MASKED), {"nothing_trained", "truncated"}),
    ],
    ids=["a reward of 0", "cut", "cut and masked"],
)
def test_a_run_that_does_not_learn_says_why(
    options: tuple[str, ...], symptoms: set[str], start: Callable[..., Run]
) -> None:
    large = ("learner.groups_per_step=40", "learner.num_train_steps=4")  # 3 steps with 100 groups or more are enough
    run = start(*options, *large, "evaluation.every_n_versions=0", "data.eval=null")
    code, output = run.wait()
    assert code == 0, output
    log, report = (run.folder / "logs" / "learner.log").read_text(), (run.folder / "report.html").read_text()
    for place in (output, log, report):
        assert set(re.findall(r"health: (\w+): ", place)) == symptoms
    assert len(re.findall("health: ", output)) == len(symptoms), "each is said once"
    assert set(re.findall(r"health at the end: (\w+): ", output)) == symptoms


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed here")
def test_a_prometheus_finds_all_processes_and_all_that_panels_ask_for(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    targets = tmp_path / "targets"
    earlier = load_config("quickstart.yaml", [f"telemetry.targets_folder={targets}"])
    Targets(earlier, tmp_path / "run").add("rollout-7", 9)  # of an earlier start with more workers, which was killed
    run = start("learner.num_train_steps=100000", "rollout.num_workers=2", "launcher.max_restarts=5")
    run.wait_for(lambda: len(run.records()) >= 3)
    names = {"learner", "rollout-0", "rollout-1"}
    assert {path.name.split(".")[-2] for path in targets.iterdir()} == names
    with prometheus(tmp_path, targets) as server:
        up = 'up{job="areal_rloo", run="run"} == 1'

        def watched() -> set[str]:
            return {series["metric"]["process"] for series in server.query(up)}

        eventually(lambda: watched() == names, "all processes")
        eventually(lambda: server.query('areal_rloo_symptom{symptom="no_signal"} == 1'), "the symptom")
        assert [expression for expression in expressions() if not _has_data(server.query, expression)] == []
        shown = [with_values(target["expr"]) for panel in panels() for target in panel["targets"]]
        asked = [one for one in shown if not re.search(f"{OTHERS}|{NOTHING_HERE}", one)]
        assert len(asked) > 0.8 * len(shown)
        eventually(lambda: [one for one in asked if not server.query(one)] == [], "data in every panel")

        def rules() -> set[str]:
            return {rule["health"] for group in server.ask("rules")["groups"] for rule in group["rules"]}

        eventually(lambda: rules() == {"ok"}, "an evaluation of every rule")

        top = subprocess.run(
            [sys.executable, "-m", "areal_rloo.top", str(run.folder), "--once"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "step " in top.stdout
        assert all(re.search(rf"^ *{name} +\d+ ", top.stdout, re.MULTILINE) for name in names), top.stdout

        run.children("areal_rloo.rollout")[0].kill()  # the next process of this worker has another port
        eventually(lambda: watched() != names, "the loss of a process")
        eventually(lambda: watched() == names, "its next process")
        run.process.terminate()
        code, output = run.wait()
        assert code == 0, output
        assert list(targets.iterdir()) == []
        eventually(lambda: server.query("up") == [], "the end of the targets")


# What this run has not: servers of engines, devices in turns, GPUs, dropped rewards, refused workers.
OTHERS = r"(sglang|vllm):|areal_rloo_(engine_server_|turn_|gpu_|reward_dropped_|intake_refused_|fleet_refused_)"


NOTHING_HERE = r"ledger_dropped"  # by a reason; this run drops nothing


def _has_data(query: Callable[[str], list[object]], expression: str) -> bool:
    """Ask for every metric of an expression: a condition that does not hold gives no series."""
    names = set(re.findall(r"\b(?:areal_rloo_\w+|(?:sglang|vllm):\w+)", expression))
    return all(re.match(OTHERS, name) or query(name) for name in names)
