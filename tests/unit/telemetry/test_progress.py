"""Progress: a live line on a terminal, a few plain lines elsewhere."""

import io
import math
import re
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console

from areal_rloo.telemetry.progress import Progress
from areal_rloo.telemetry.records import EvalRecord, LedgerCounts, TrainRecord

MakeTrainRecord = Callable[..., TrainRecord]


def plain(num_train_steps: int = 20) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(Console(file=out, width=80), num_train_steps=num_train_steps, eval_set="arithmetic"), out


def test_a_line_has_step_reward_accuracy_speed_staleness_time_left(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    progress, out = plain()
    with progress:
        train = make_train_record(num_train_steps=5, policy_version=5, wall_s=50.0, trained_tokens_per_s=1234.0)
        progress.show([eval_record, train])
    line = out.getvalue().splitlines()[-1]
    for part in (
        "step 5/20  epoch 0.50",
        "reward 0.500",
        "eval 0.625@v4",
        "1,234 tok/s",
        "staleness 0.75 (max 2)",
        "ETA 2:30",
    ):
        assert part in line


def test_drops_are_in_the_line_if_there_are_any(
    make_train_record: MakeTrainRecord, ledger_counts: LedgerCounts
) -> None:
    for dropped, words in (({"reward_timeout": 16}, "(max 2)  dropped 25 %"), ({}, "(max 2)")):
        progress, out = plain()
        with progress:
            ledger = msgspec.structs.replace(ledger_counts, admitted=64, dropped=dropped)
            progress.show([make_train_record(ledger=ledger)])
        assert words in " ".join(out.getvalue().split("\n"))


def test_the_line_counts_the_workers_if_some_are_missing(make_train_record: MakeTrainRecord) -> None:
    """Of two workers, one hangs: half of the fleet is lost, and the run goes on."""
    for alive, words in ((1, "dropped 6 %  1 of 2 workers"), (2, "dropped 6 %")):
        out = io.StringIO()
        with Progress(Console(file=out, width=300), num_train_steps=20) as progress:
            progress.num_wanted = 2
            progress.show([make_train_record(num_workers=alive)])
        assert out.getvalue().splitlines()[-1].endswith(words)


def test_the_line_has_no_accuracy_before_the_first_evaluation(make_train_record: MakeTrainRecord) -> None:
    progress, out = plain()
    with progress:
        progress.show([make_train_record()])
    assert "eval -" in out.getvalue()


def test_the_line_names_the_bottleneck_of_the_steps_after_the_first(make_train_record: MakeTrainRecord) -> None:
    def record(step: int, idle_s: float) -> TrainRecord:
        numbers = {"num_train_steps": step, "policy_version": step, "wall_s": 10.0 * step}
        return make_train_record(**numbers, learner_idle_s=idle_s, rollout_idle_s=0.0)

    progress, out = plain()
    with progress:
        for step, idle_s in ((1, 9.0), (2, 12.0), (3, 16.0)):
            progress.show([record(step, idle_s)])
    assert "bound" not in "".join(out.getvalue().splitlines()[:2]), "the first wait is for the workers to start"
    assert "rollout-bound (the learner waits 35 %)" in progress.line()
    progress.go_back(1)
    progress.show([record(2, 10.0), record(3, 11.0), record(4, 14.0)])
    assert "rollout-bound (the learner waits 20 %)" in progress.line()


def test_plain_lines_are_limited_and_the_last_step_is_always_shown(make_train_record: MakeTrainRecord) -> None:
    progress, out = plain(num_train_steps=100)
    with progress:
        for step in range(1, 101):
            progress.show([make_train_record(num_train_steps=step)])
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
    assert lines[0].startswith("step 1/100")
    assert lines[-1].startswith("step 100/100")
    assert len(lines) < 50


def test_an_evaluation_after_the_last_step_does_not_repeat_the_step(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    progress, out = plain()
    with progress:
        progress.show([make_train_record(num_train_steps=20)])
        progress.show([eval_record])
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["step", "evaluation:"]


def test_a_terminal_keeps_the_line_of_each_evaluation(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, legacy_windows=False)
    with Progress(console, num_train_steps=20, eval_set=eval_record.name) as progress:
        progress.show([eval_record, make_train_record()])
    assert "evaluation: version 4, " in out.getvalue()


def test_a_failed_checkpoint_is_reported_once(make_train_record: MakeTrainRecord) -> None:
    progress, out = plain()
    with progress:
        for num_failed in (0, 1, 1):
            progress.show([make_train_record(failed_checkpoints=num_failed)])
    assert out.getvalue().count("could not be written") == 1


def test_a_restart_from_an_earlier_version_shows_an_earlier_evaluation(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    earlier = msgspec.structs.replace(eval_record, policy_version=2, accuracy=0.5, reward=0.5)
    progress, _ = plain()
    with progress:
        progress.show([earlier, eval_record, make_train_record(num_train_steps=6, policy_version=6)])
        assert "eval 0.625@v4" in progress.line()
        progress.go_back(3)
        progress.show([make_train_record(num_train_steps=4, policy_version=3)])
        assert "eval 0.500@v2" in progress.line()
        progress.show([make_train_record(num_train_steps=1, policy_version=1)])
    assert "eval -" in progress.line()


def test_the_line_shows_the_set_of_the_config_alone(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    progress, _ = plain()
    with progress:
        progress.show([msgspec.structs.replace(eval_record, name="second"), make_train_record(policy_version=5)])
        assert "eval -" in progress.line()
        progress.show([eval_record, msgspec.structs.replace(eval_record, name="second", accuracy=0.25, reward=0.25)])
        assert "eval 0.625@v4" in progress.line()


def test_a_resume_recalls_no_accuracy_of_lost_weights(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    """The learner restarted from version 5: step 6 comes twice."""
    lost = [msgspec.structs.replace(eval_record, policy_version=6)]
    before, again = (make_train_record(num_train_steps=6, policy_version=6, wall_s=wall_s) for wall_s in (6.0, 7.0))
    live, recalled = plain()[0], plain()[0]
    with live:
        live.show([before, *lost])
        assert "eval 0.625@v6" in live.line()
        live.go_back(5)
        live.show([again])
    recalled.recall([before, *lost, again], version=6)
    assert recalled.line() == live.line()
    assert "eval -" in recalled.line()


def test_records_of_an_earlier_launcher_are_not_printed(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    progress, out = plain()
    with progress:
        trained = make_train_record(num_train_steps=6, policy_version=6, failed_checkpoints=1)
        progress.recall([eval_record, trained], version=6)
        assert out.getvalue() == ""
        progress.show([make_train_record(num_train_steps=7, policy_version=7, failed_checkpoints=1)])
    assert out.getvalue().startswith("step 7/20")
    assert "eval 0.625@v4" in out.getvalue()
    assert "could not be written" not in out.getvalue()


def test_a_resume_shows_no_step_after_its_checkpoint(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, width=120, legacy_windows=False), num_train_steps=20)
    with progress:
        progress.recall([make_train_record(num_train_steps=step, policy_version=step) for step in (5, 6, 7)], version=5)
        progress.show([eval_record])
    assert "step 5/20" in out.getvalue()
    assert "step 7/20" not in out.getvalue()


@pytest.mark.parametrize(("version", "step"), [(5, 5), (-1, 0)])
def test_a_restarted_learner_goes_back_to_the_step_of_its_checkpoint(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord, version: int, step: int
) -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, width=120, legacy_windows=False), num_train_steps=20)
    with progress:
        progress.show([make_train_record(num_train_steps=7, policy_version=7, failed_checkpoints=1)])
        out.truncate(out.seek(0))
        progress.go_back(version)
        progress.show([eval_record])
        assert f"step {step}/20" in out.getvalue()
        assert "step 7/20" not in out.getvalue()
        progress.show([make_train_record(num_train_steps=6, policy_version=6, failed_checkpoints=1)])
    assert "could not be written" not in out.getvalue(), "it was said before"


def test_without_new_records_nothing_is_shown(make_train_record: MakeTrainRecord) -> None:
    progress, out = plain()
    with progress:
        progress.show([])
        progress.show([make_train_record(num_train_steps=20)])
        before = out.getvalue()
        progress.show([])
    assert out.getvalue() == before


def test_a_line_is_not_wrapped_in_a_narrow_output(make_train_record: MakeTrainRecord) -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=20), num_train_steps=5)
    with progress:
        progress.show([make_train_record()])
        progress.say("run folder: /a/path/that/is/longer/than/the/width [bold]of the console[/bold]")
    assert len(out.getvalue().splitlines()) == 2
    assert "[bold]" in out.getvalue(), "a path with brackets is not markup"


def test_a_terminal_gets_a_single_line_that_is_rewritten(make_train_record: MakeTrainRecord) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, legacy_windows=False)
    progress = Progress(console, num_train_steps=50)
    with progress:
        for step in range(1, 11):
            progress.show([make_train_record(num_train_steps=step)])
        progress.say("a line that stays")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "step 10/50" in text
    assert "a line that stays" in text
    assert out.getvalue().count("\n") < 10, "ten steps, but not ten lines"


def test_a_narrow_terminal_cuts_the_live_line(make_train_record: MakeTrainRecord) -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, width=30, legacy_windows=False), num_train_steps=5)
    with progress:
        progress.show([make_train_record()])
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert all(len(line) <= 30 for line in re.split(r"[\r\n]", text))
    assert "…" in text


def test_a_quiet_run_reports_only_problems(
    make_train_record: MakeTrainRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    unsaved = "a checkpoint could not be written to here: no space"
    progress = Progress(Console(quiet=True), num_train_steps=20, unsaved=lambda: unsaved)
    with progress:
        progress.say("run folder: here")
        progress.show([make_train_record(failed_checkpoints=0), make_train_record(failed_checkpoints=1)])
        progress.warn("the learner ended with code 1")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "a checkpoint could not be written to here: no space",
        "the learner ended with code 1",
    ]


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e308, -1e308])
def test_numbers_of_any_size_give_a_short_line(make_train_record: MakeTrainRecord, number: float) -> None:
    progress, out = plain()
    with progress:
        train = make_train_record(
            wall_s=number, reward_mean=number, trained_tokens_per_s=number, staleness_mean=number, num_train_steps=20
        )
        progress.show([train])
    (line,) = out.getvalue().splitlines()
    assert "ETA" in line and len(line) < 200


@pytest.mark.parametrize("quiet", [False, True])
def test_control_characters_do_not_reach_the_terminal(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(Console(force_terminal=True, quiet=quiet), num_train_steps=5)
    progress.warn("rollout-0 ended. Error: \x1b[2J\x1b]0;owned\x07\nerror: forged")
    output = "".join(capsys.readouterr())
    (line,) = output.splitlines()
    assert line.isprintable()


def test_a_run_continues_after_its_output_is_closed() -> None:
    says = (
        "from areal_rloo.telemetry.progress import Progress, RunConsole\n"
        "progress = Progress(RunConsole(), num_train_steps=1)\n"
        "input()\n"
        "for _ in range(3):\n"
        "    progress.say('step')\n"
        "raise SystemExit(7)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", says], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(b"\n")
    assert (process.returncode, errors) == (7, b"")
