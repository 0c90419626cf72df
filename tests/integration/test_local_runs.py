"""Whole runs under the local launcher, small and on CPU: real processes, sockets, weights and signals."""

import itertools
import json
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.local_runs import Run, assert_drained, balanced, gone

from areal_rloo.algorithm.kl import adapted_coefficient
from areal_rloo.config import AdaptiveKLConfig
from areal_rloo.trace.joined import read_traces
from areal_rloo.trace.lives import lives

pytestmark = pytest.mark.slow


def test_two_runs_on_a_host_end_with_balanced_ledgers(start: Callable[..., Run], tmp_path: Path) -> None:
    """One run has a reference policy. The other has an entry script, and functions in place of our parts."""
    script = tmp_path / "my_rl.py"
    script.write_text(
        "import os, sys\n"
        "from areal_rloo.rollout.episode import SingleTurn\n"
        "with open(os.path.join(os.path.dirname(__file__), 'imported'), 'a') as file:\n"
        "    print(*(word for word in sys.argv if word.startswith(('--worker-id', '--rank'))), file=file)\n"
        "def brevity(completion_ids):\n"
        "    return 1 - len(completion_ids) / 24\n"
        "class Mine(SingleTurn):\n"
        "    def __init__(self, config):\n"
        "        pass\n"
    )
    (tmp_path / "mine.py").write_text(
        "def even(group):\n    return group.group_id % 2 == 0\n"
        "def loss(current_logprobs, advantages):\n    return -current_logprobs * advantages\n"
        "def centred(rewards):\n    return rewards - rewards.mean()\n"
        "def fresh(staleness):\n    return 1 / (1 + staleness)\n"
        "def first(items, rewards):\n    return [1] + [0] * (len(items) - 1)\n"
    )
    plain = start(
        *("algorithm.max_staleness=2", "learner.num_train_steps=6"),
        *("algorithm.kl.coefficient=0.1", "algorithm.kl.placement=loss", "algorithm.kl.estimator=k3"),
        name="plain",
    )
    with_script = start(
        "data.train.rewards=[{task: arithmetic}, {function: 'entry:brevity', weight: 0.5}]",
        "rollout.episode.type=entry:Mine",
        f"algorithm.group_filter={tmp_path / 'mine.py'}:even",
        f"algorithm.loss.kind={tmp_path / 'mine.py'}:loss",
        f"algorithm.advantages={tmp_path / 'mine.py'}:centred",
        f"algorithm.sample_weights={tmp_path / 'mine.py'}:fresh",
        f"data.curriculum={tmp_path / 'mine.py'}:first",
        name="with_script",
        entry=script,
    )
    code, output = plain.wait()
    assert code == 0, output
    _assert_ends_balanced(plain, output)
    first = plain.records()[0]
    assert 0 <= first.reference_kl_k3 < 1e-4  # sampled by the engine with the weights that the reference has

    code, output = with_script.wait()
    assert code == 0, output
    assert all("brevity" in record.reward_parts for record in with_script.records())
    assert {"--rank=0", "--worker-id=rollout-0"} <= set((tmp_path / "imported").read_text().splitlines())
    ledger = with_script.summary()["ledger"]
    assert balanced(ledger)
    assert ledger["trained"] == 5 * 16
    assert ledger["dropped"]["group_filter"] >= 5 * 16 - 4
    assert all(f"your code: algorithm.{key}" in output for key in ("loss.kind", "advantages", "sample_weights"))
    assert all(record.ratio_clipped_share == 0 for record in with_script.records())
    trajectories = (with_script.folder / "trajectories.jsonl").read_text().splitlines()
    assert {json.loads(line)["item_index"] for line in trajectories} == {0}, "the curriculum draws no other item"


def _assert_ends_balanced(run: Run, output: str) -> None:
    """Check a run of 6 steps with a bound of 2."""
    summary = run.summary()
    assert summary["exit_reason"] == "completed"
    assert summary["num_train_steps"] == summary["policy_version"] == 6
    assert summary["ledger"] == {
        "admitted": 96,
        "trained": 96,
        "dropped": {},
        "dropped_tokens": {},
        "buffered": 0,
        "in_flight": 0,
    }
    assert summary["evaluation"][0]["policy_version"] == 0
    assert summary["evaluation"][-1]["policy_version"] == 6
    assert 0 < summary["staleness"]["mean_trained"] <= summary["staleness"]["max_trained"] <= 2
    assert summary["time_s"].keys() >= {"warm_start", "wall", "learner_idle", "rollout_idle"}
    assert all(record.ledger.balanced for record in run.records())
    assert len(run.records()) == 6
    assert (run.folder / "report.html").stat().st_size > 5000
    assert "report.html\ntrajectories: " in output
    assert "restart" not in (run.folder / "logs" / "launcher.log").read_text()
    assert run.children("areal_rloo.rollout") == []


def test_staleness_zero_gives_fresh_tokens_and_repeatable_runs(start: Callable[..., Run]) -> None:
    """A trace changes no number."""
    losses, options = [], {"one": "false", "two": "true"}
    for run in [start("algorithm.max_staleness=0", f"telemetry.trace={options[name]}", name=name) for name in options]:
        code, output = run.wait()
        assert code == 0, output
        assert run.summary()["staleness"]["by_value"].keys() == {"0"}
        losses.append([(r.loss, r.reward_mean, r.gradient_norm, r.trained_tokens) for r in run.records()])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 1, "the steps differ"


def test_killed_processes_are_replaced_and_the_run_completes(start: Callable[..., Run]) -> None:
    """Kill a reward process, then a rollout worker, then the learner, in a single run. Its trace tells all steps."""
    run = start("learner.num_train_steps=32", "launcher.max_learner_restarts=1", "telemetry.trace=true")
    run.wait_for(lambda: len(run.records()) >= 2)
    (worker,) = run.children("areal_rloo.rollout")
    scorers = worker.children()
    assert len(scorers) == 2
    scorers[0].kill()
    psutil.wait_procs(scorers[:1], timeout=120)
    _wait_for_steps(run, 2)
    scorers = worker.children()
    assert len(scorers) == 2
    worker.kill()
    _, alive = psutil.wait_procs(scorers, timeout=120)
    assert alive == [], "it takes its reward processes with it"
    _wait_for_steps(run, 2)
    (learner,) = run.children("areal_rloo.learner")
    learner.kill()
    code, output = run.wait()
    assert code == 0, output
    assert "the learner ended with code 137" in output
    before, restart, after = re.split(r"the learner restarts from step-(\d+) \(restart 1 of 1\)", output)
    log = (run.folder / "logs" / "launcher.log").read_text()
    assert "restarted rollout-0" in log
    assert f"the learner restarts from step-{restart} (restart 1 of 1)" in log
    assert "rollout-0 ended with code 137 (SIGKILL); restart in" in before
    for part, first in ((before, 0), (after, int(restart))):  # what the learner discards is done and said again
        said = [int(version) for version in re.findall(r"evaluation: version (\d+)", part)]
        assert said == sorted(set(said)), "an evaluation is said twice"
        assert said[0] >= first
    ledger = run.summary()["ledger"]
    assert balanced(ledger)
    assert ledger["dropped"].keys() <= {"reward_crash", "stale"}, "the prompts of stale groups come again"
    assert ledger["dropped"].get("reward_crash", 0) <= 1
    assert ledger["trained"] + ledger["dropped"].get("reward_crash", 0) == 32 * 16
    assert [record.num_train_steps for record in run.records()] == list(range(1, 33))
    _assert_traced(run, num_steps=32)


def _assert_traced(run: Run, *, num_steps: int) -> None:
    """Check that the lives of the samples of the last step are whole, and in order."""
    events = read_traces(run.folder)
    assert {event.process for event in events} == {"learner", "rollout-0"}
    of_steps = {event.name for event in events if event.track == "training"}
    assert {"step 1", f"step {num_steps}"} <= of_steps, "the last second before a kill may be missing"
    assert {"wait for a batch", "forward", "backward", "optimizer", "records", "gather weights"} <= of_steps
    assert {event.track for event in events if event.process == "rollout-0"} == {"samples", "engine", "weights"}
    last = [life for life in lives(events) if life.taken is not None and life.taken.details["step"] == num_steps]
    assert len(last) == 16
    for life in last:
        assert life.granted_s is not None
        assert life.arrived_s is not None
        assert life.episode is not None
        assert life.taken is not None
        assert {stage.name for stage in life.stages} == {"generate", "reward"}
        times = [life.granted_s, life.episode.began_s, life.episode.ended_s, life.arrived_s, life.taken.began_s]
        assert times == sorted(times)
    assert (run.folder / "trace.json.gz").is_file()


def _wait_for_steps(run: Run, num: int) -> None:
    at = len(run.records())
    run.wait_for(lambda: len(run.records()) >= at + num)


def test_resume_after_a_killed_learner_restores_kl_and_reference(
    start: Callable[..., Run],
) -> None:
    """The coefficient of each step follows from the previous coefficient and divergence, also across the kill."""
    kl = (
        "algorithm.preset=grpo",
        "algorithm.kl.adaptive={target: 1e-6, horizon: 100}",
        "model.reference.refresh_every_n_versions=3",
        "learner.optimizer.learning_rate=1e-3",
    )
    run = start(*kl, "learner.num_train_steps=10000")
    run.wait_for_checkpoint(4)
    (learner,) = run.children("areal_rloo.learner")
    learner.kill()
    code, output = run.wait()
    assert code == 137, output
    assert "areal-rloo resume " in output
    saved = run.saved_steps()
    last = saved + 4
    (run.folder / "model.json").write_bytes(b'{"path"')  # a cut note is no reason to refuse the resume
    again = Run(run.folder, *kl, f"learner.num_train_steps={last}", "--resume")
    code, output = again.wait()
    assert again.process.stdout is not None
    again.process.stdout.close()
    assert code == 0, output
    assert f"\nresume: from step {saved}\n" in output
    records = run.records()
    assert [record.num_train_steps for record in records] == list(range(1, last + 1))
    adaptive = AdaptiveKLConfig(target=1e-6, horizon=100)
    for one, following in itertools.pairwise(records):
        expected = adapted_coefficient(
            one.kl_coefficient, divergence=one.reference_kl_k3, num_trajectories=16, config=adaptive
        )
        assert following.kl_coefficient == pytest.approx(expected)
    assert len({record.kl_coefficient for record in records}) == last
    ledger = run.summary()["ledger"]
    assert balanced(ledger)
    assert (ledger["trained"], run.summary()["num_train_steps"]) == (last * 16, last)


def test_a_disk_too_full_for_checkpoints_changes_only_the_exit_code(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=8", "checkpoint.every_n_steps=4", "launcher.max_learner_restarts=2")
    run.wait_for((run.folder / "config.yaml").exists)
    (run.folder / "checkpoints").write_text("in the way, as a full disk would be")
    (run.folder / "report.html").mkdir()
    code, output = run.wait()
    assert code == 1, output
    folder = run.folder / "checkpoints"
    said = re.search(
        rf"a checkpoint could not be written to {folder}: (.*); training continues, free some disk", output
    )
    assert said is not None and str(folder) in said[1], "the reason names the file in the way"
    assert "version 8 could not be saved" in output
    assert "the learner restarts" not in output, "the end would be the same"
    assert f"no report: {run.folder}: the report cannot be made" in output
    summary = run.summary()
    assert (summary["num_train_steps"], summary["failed_checkpoints"]) == (8, 3)
    assert summary["exit_reason"] == "failed"
    assert balanced(summary["ledger"])


def test_a_closed_terminal_drains_the_run_however_often_it_signals(start: Callable[..., Run]) -> None:
    as_in_a_shell = ("env", "--default-signal=HUP")  # these tests may run under nohup
    run = start("learner.num_train_steps=10000", before=as_in_a_shell)
    run.wait_for(lambda: len(run.records()) >= 1)
    code, output = _signal_twice(run, signal.SIGHUP)
    assert code == 0, output
    assert_drained(run)


def test_a_run_under_nohup_survives_the_terminal(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=8", before=("nohup",))
    run.wait_for(lambda: len(run.records()) >= 1)
    run.process.send_signal(signal.SIGHUP)
    code, output = run.wait()
    assert code == 0, output
    assert run.summary()["exit_reason"] == "completed"


def test_a_second_signal_stops_at_once(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=10000")
    run.wait_for(lambda: len(run.records()) >= 1)
    (learner,) = run.children("areal_rloo.learner")
    learner.suspend()  # it cannot drain
    code, output = _signal_twice(run, signal.SIGINT)
    assert code == 137, output
    assert "a second signal (Ctrl-C or SIGTERM) stopped the learner at once: exit code 137 (SIGKILL)" in output
    assert "the learner ended" not in output


def _signal_twice(run: Run, number: signal.Signals) -> tuple[int, str]:
    """Send the signal a second time when the run says that it drains; wait for the end."""
    run.process.send_signal(number)
    assert run.process.stdout is not None
    assert any("draining" in line for line in run.process.stdout)
    run.process.send_signal(number)
    return run.wait()


def test_a_live_run_is_not_resumed_and_a_dead_launcher_leaves_no_orphan(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=10000", "wire.transport=tcp")
    run.wait_for(lambda: len(run.records()) >= 1)
    before = {path: path.read_bytes() for path in (run.folder / "config.yaml", *(run.folder / "keys").iterdir())}
    options = ("learner.num_train_steps=10000", "wire.transport=tcp", "launcher.drain_timeout_s=1")
    again = Run(run.folder, *options, "--resume")
    code, output = again.wait()
    assert again.process.stdout is not None
    again.process.stdout.close()
    assert code == 2, output
    assert "is in use by another launcher; wait for its end" in output
    assert all(path.read_bytes() == content for path, content in before.items()), "nothing was written"
    run.process.kill()
    run.process.wait()
    assert gone(run)


def test_two_workers_over_gloo_and_curve_train_serve_metrics_and_drain(start: Callable[..., Run]) -> None:
    run = start(
        *(
            "rollout.num_workers=2",
            "weights.transport=collective",
            "wire.transport=tcp",
            "learner.num_train_steps=10000",
        )
    )
    run.wait_for(lambda: any(record.num_workers == 2 for record in run.records()))
    both_since = len(run.records())
    run.wait_for(lambda: len(run.records()) > both_since + 5)
    for process, metric in (
        ("learner", "areal_rloo_num_train_steps_total"),
        ("rollout-0", "areal_rloo_engine_generated_tokens_total"),
    ):
        log = (run.folder / "logs" / f"{process}.log").read_text()
        found = re.search(r"metrics on http://127.0.0.1:(\d+)/metrics", log)
        assert found is not None, log
        run.wait_for(lambda p=int(found[1]), m=metric: _scraped(p, m) > 0)  # type: ignore[misc]
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait()
    assert code == 0, output
    assert_drained(run)
    for name in ("rollout-0", "rollout-1"):
        assert "done" in (run.folder / "logs" / f"{name}.log").read_text()
    assert {record.num_workers for record in run.records()[both_since : both_since + 5]} == {2}


def _scraped(port: int, metric: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        values = [line for line in answer.read().decode().splitlines() if line.startswith(metric + " ")]
    return float(values[0].split()[1]) if values else 0.0


def test_gsm8k_trains_on_the_embedded_engine(start: Callable[..., Run], gsm8k_folder: Path) -> None:
    run = start(
        f"data.train.path={gsm8k_folder / 'train.jsonl'}",
        "rollout.engine=embedded",
        "rollout.num_workers=1",
        "model.path=tiny",
        "model.dtype=float32",
        "data.max_prompt_tokens=1600",
        "learner.num_train_steps=3",
        "learner.microbatch_tokens=4096",
        "learner.num_minibatches=1",
        config="gsm8k_rloo.yaml",
    )
    code, output = run.wait()
    assert code == 0, output
    assert run.summary()["num_train_steps"] == 3
    assert balanced(run.summary()["ledger"])


def test_an_epoch_trains_every_prompt_once_with_a_small_last_batch(start: Callable[..., Run]) -> None:
    without = ("checkpoint.every_n_steps=0", "checkpoint.at_end=false")
    run = start("data.num_epochs=1", "data.train.num_prompts=10", "learner.num_train_steps=100", *without)
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["exit_reason"] == "end_of_data"
    assert summary["num_train_steps"] == 3
    assert summary["ledger"] == {
        "admitted": 40,
        "trained": 40,
        "dropped": {},
        "dropped_tokens": {},
        "buffered": 0,
        "in_flight": 0,
    }
    assert not (run.folder / "checkpoints").exists(), "at_end=false"
    assert run.records()[-1].epoch == 1.0
