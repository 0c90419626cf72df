"""A run without progress, and resumes of the learner, from its log to the terminal."""

from pathlib import Path

import pytest

from areal_rloo.launcher.learner_log import LearnerLog, Silence

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

    def __init__(self, folder: Path, *, worker: str = "") -> None:
        self.log = _Log(folder)
        self.now_s = 100.0
        say, path = self.log.said.append, self.log.path
        self._silence = Silence(say, log=self.log.log, path=path, worker=lambda: worker, clock=lambda: self.now_s)

    def after(self, seconds: int, *, then: int = 0) -> list[str]:
        """Let seconds pass, the last with so many records; return the new lines."""
        num_said = len(self.log.said)
        for second in range(1, seconds + 1):
            self.now_s += 1
            self.log.log.look()
            self._silence.look(then if second == seconds else 0)
        return self.log.said[num_said:]


def test_a_run_without_a_step_says_so_every_30_s(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    assert [line.partition(";")[0] for line in run.after(100)] == [f"no train step for {s} s" for s in (30, 60, 90)]
    assert run.after(1, then=1) == []
    assert run.after(29) == []


@pytest.mark.parametrize(("pace_s", "first_s"), [(2, 30), (15, 45), (600, 1800)])
def test_a_wait_is_said_when_it_is_long_for_this_run(pace_s: int, first_s: int, tmp_path: Path) -> None:
    run = _Run(tmp_path)
    run.after(pace_s, then=1)
    for _ in range(3):
        assert run.after(pace_s, then=1) == []
    assert run.after(first_s - 1) == []
    assert run.after(1)[0].startswith(f"no train step for {first_s} s; ")


def test_a_slow_beginning_is_forgotten_after_ten_records(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    run.after(300, then=1)
    assert run.after(20, then=10) == []
    assert len(run.after(30)) == 1


def test_the_line_has_the_newest_wait_of_the_learner(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    assert run.after(30)[0].endswith(f"; the learner says: the log is empty ({run.log.path})")
    run.log.look(_line("resume: from step 3", module="checkpoint"), _line("metrics on http://a", level="INFO"))
    assert run.after(30)[-1].endswith(f"; the learner says: metrics on http://a ({run.log.path})")
    run.log.look(_line(_wait(60)), _line("rollout-0 says hello", module="intake", level="INFO"))
    assert run.after(30) == [f"no train step for 90 s; the learner says: {_wait(60)} ({run.log.path})"]
    run.after(1, then=10)
    run.after(1, then=10)
    assert run.after(90)[-1].endswith(f"the learner says: rollout-0 says hello ({run.log.path})")


def test_a_wait_without_a_worker_has_the_last_words_of_a_worker(tmp_path: Path) -> None:
    run = _Run(tmp_path, worker="rollout-0 says: waiting for a server")
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
