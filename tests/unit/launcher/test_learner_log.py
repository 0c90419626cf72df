"""A run without progress, and resumes of the learner, from its log to the terminal."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from areal_rloo.launcher.learner_log import LearnerLog, Silence
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord

MakeTrainRecord = Callable[..., TrainRecord]

_BEGIN = "2026-01-02T03:04:05.006Z"


def _line(text: str, *, module: str = "service", begin: str = "", level: str = "WARNING") -> str:
    return f"{begin}{_BEGIN} {level:<7} learner {module}: {text}\n"


def _wait(waited_s: int) -> str:
    return f"waits for the next batch, {waited_s} s so far: 0 groups ready"


class _Log:
    def __init__(self, folder: Path, *, before: str = "") -> None:
        self.path = folder / "learner.log"
        if before:
            self.path.write_text(before)
        self.said: list[str] = []
        self.resumed: list[int] = []
        self.log = LearnerLog(self.path, self.said.append, resumed=self.resumed.append)

    def look(self, *lines: str) -> str:
        """Add lines to the log; return the newest record."""
        with self.path.open("a") as file:
            file.writelines(lines)
        self.log.look()
        return self.log.newest


class _Run:
    """A launcher's look each second; a step takes the seconds between two records."""

    def __init__(self, folder: Path, make: MakeTrainRecord, *, worker: str = "") -> None:
        self.log = _Log(folder)
        self.now_s = 100.0
        say, path = self.log.said.append, self.log.path
        self._silence = Silence(
            say, log=self.log.log, path=path, num_train_steps=100, worker=lambda: worker, clock=lambda: self.now_s
        )
        self._make, self._num_steps = make, 0

    def after(self, seconds: int, *, then: int = 0, evaluations: Sequence[EvalRecord] = ()) -> list[str]:
        """Let seconds pass, the last with so many train steps and these evaluations; return the new lines."""
        num_said = len(self.log.said)
        for second in range(1, seconds + 1):
            self.now_s += 1
            self.log.log.look()
            steps = range(self._num_steps + 1, self._num_steps + then + 1) if second == seconds else ()
            self._num_steps += len(steps)
            records: list[Record] = [self._make(num_train_steps=step) for step in steps]
            self._silence.look([*records, *(evaluations if second == seconds else ())])
        return self.log.said[num_said:]


def test_a_run_without_a_step_says_so_every_30_s(make_train_record: MakeTrainRecord, tmp_path: Path) -> None:
    run = _Run(tmp_path, make_train_record)
    assert [line.partition(";")[0] for line in run.after(100)] == [f"no train step for {s} s" for s in (30, 60, 90)]
    assert run.after(1, then=1) == []
    assert run.after(29) == []


@pytest.mark.parametrize(("pace_s", "first_s"), [(2, 30), (15, 45), (600, 1800)])
def test_a_wait_is_said_when_it_is_long_for_this_run(
    make_train_record: MakeTrainRecord, pace_s: int, first_s: int, tmp_path: Path
) -> None:
    run = _Run(tmp_path, make_train_record)
    run.after(pace_s, then=1)
    for _ in range(3):
        assert run.after(pace_s, then=1) == []
    assert run.after(first_s - 1) == []
    assert run.after(1)[0].startswith(f"no train step for {first_s} s; ")


def test_an_evaluation_is_no_step(make_train_record: MakeTrainRecord, eval_record: EvalRecord, tmp_path: Path) -> None:
    run = _Run(tmp_path, make_train_record)
    run.after(20, then=1)
    assert run.after(1, evaluations=[eval_record] * 5) == []
    assert run.after(58) == []
    assert run.after(1)[0].startswith("no train step for 60 s; ")


def test_a_run_that_only_evaluates_is_not_silent(make_train_record: MakeTrainRecord, tmp_path: Path) -> None:
    run = _Run(tmp_path, make_train_record)
    run.after(1, then=100)
    assert run.after(1000) == []


def test_a_slow_beginning_is_forgotten_after_ten_records(make_train_record: MakeTrainRecord, tmp_path: Path) -> None:
    run = _Run(tmp_path, make_train_record)
    run.after(300, then=1)
    assert run.after(20, then=10) == []
    assert len(run.after(30)) == 1


def test_the_line_has_the_newest_wait_of_the_learner(make_train_record: MakeTrainRecord, tmp_path: Path) -> None:
    run = _Run(tmp_path, make_train_record)
    assert run.after(30)[0].endswith(f"; the learner says: the log is empty ({run.log.path})")
    run.log.look(_line("resume: from step 3", module="checkpoint"), _line("metrics on http://a", level="INFO"))
    assert run.after(30)[-1].endswith(f"; the learner says: metrics on http://a ({run.log.path})")
    run.log.look(_line(_wait(60)), _line("rollout-0 says hello", module="intake", level="INFO"))
    assert run.after(30) == [f"no train step for 90 s; the learner says: {_wait(60)} ({run.log.path})"]
    run.after(1, then=10)
    run.after(1, then=10)
    assert run.after(90)[-1].endswith(f"the learner says: rollout-0 says hello ({run.log.path})")


def test_a_wait_without_a_worker_has_the_last_words_of_a_worker(
    make_train_record: MakeTrainRecord, tmp_path: Path
) -> None:
    run = _Run(tmp_path, make_train_record, worker="rollout-0 says: waiting for a server")
    run.log.look(_line("waits for the next batch, 30 s so far: no rollout worker is connected"))
    assert run.after(30)[0].endswith("learner.log); rollout-0 says: waiting for a server")
    run.log.look(_line(_wait(60)))
    assert run.after(30)[0].endswith("learner.log)")


def test_a_line_that_is_not_whole_is_read_later(tmp_path: Path) -> None:
    log = _Log(tmp_path)
    assert log.look(_line("one"), _line(_wait(60))[:-20]) == "one"
    assert log.look(_line(_wait(60))[-20:]) == _wait(60)


def test_the_text_of_a_peer_is_no_record(tmp_path: Path) -> None:
    log = _Log(tmp_path)
    assert log.look(_line("one"), _line(_wait(90), begin="    ")) == "one"
    assert log.log.wait == ""


def test_the_log_of_an_earlier_launcher_is_not_read(tmp_path: Path) -> None:
    log = _Log(tmp_path, before=_line(_wait(90)))
    assert log.look() == ""
    assert log.look(_line(_wait(60))) == _wait(60)


def test_a_log_that_was_emptied_is_read_on(tmp_path: Path) -> None:
    log = _Log(tmp_path, before=_line(_wait(30)) * 10)
    log.path.write_text("")
    assert log.look(_line(_wait(60))) == _wait(60)


def test_no_log_is_no_error(tmp_path: Path) -> None:
    log = LearnerLog(tmp_path / "none.log", print)
    log.look()
    assert log.newest == ""


def test_a_resume_is_told_with_its_step_and_its_dropped_groups(tmp_path: Path) -> None:
    log = _Log(tmp_path)
    why = "because step-000020 is damaged: no"
    log.look(
        _line(f"resume: from step 15 (steps lost: 5), {why}", module="checkpoint"),
        _line("resume: 3 of 8 groups under way do not fit", module="resuming"),
        _line("resume: learner.num_train_steps 20 -> 22 from step 15 on", module="resuming", level="INFO"),
        _line("resume: from step 1", module="answers"),
    )
    assert log.said == [
        f"resume: from step 15 (steps lost: 5), {why}",
        "resume: 3 of 8 groups under way do not fit",
    ]
    assert log.resumed == [15]


def test_the_handshake_of_a_worker_is_no_news(make_train_record: MakeTrainRecord, tmp_path: Path) -> None:
    run = _Run(tmp_path, make_train_record)
    hello = "rollout-0 says hello with version 0: 358 duties, 0 lost on their way, 0 void"
    run.log.look(_line("the learner publishes version 0", module="loop"), _line(hello, module="intake", level="INFO"))
    assert run.after(30)[0].endswith(f"; the learner says: the learner publishes version 0 ({run.log.path})")
