"""Long waits and resumes of the learner, from its log to the terminal."""

from pathlib import Path

from areal_rloo.launcher.learner_log import LearnerLog


def _line(waited_s: int, *, name: str = "the next batch", module: str = "service", begin: str = "") -> str:
    text = f"{waited_s} s without progress on {name}: 0 groups ready; samples dropped so far: 8 group_filter"
    return f"{begin}2026-01-02T03:04:05.006Z WARNING learner {module}: {text}\n"


class _Log:
    def __init__(self, folder: Path, *, before: str = "") -> None:
        self.path = folder / "learner.log"
        if before:
            self.path.write_text(before)
        self.said: list[str] = []
        self.resumed: list[int] = []
        self._log = LearnerLog(self.path, self.said.append, resumed=self.resumed.append)

    def look(self, *lines: str) -> list[str]:
        """Add lines to the log; return the seconds of the waits told so far."""
        with self.path.open("a") as file:
            file.writelines(lines)
        self._log.look()
        return [text.partition(" ")[0] for text in self.said]


def test_a_wait_of_a_minute_is_told_with_the_state_of_the_run(tmp_path: Path) -> None:
    log = _Log(tmp_path)
    log.look(_line(30), _line(60))
    words = "60 s without progress on the next batch: 0 groups ready; samples dropped so far: 8 group_filter"
    assert log.said == [f"{words} ({log.path})"]


def test_a_further_wait_is_told_if_it_is_twice_as_long(tmp_path: Path) -> None:
    log = _Log(tmp_path)
    assert log.look(*map(_line, range(30, 301, 30))) == ["60", "120", "240"]
    assert log.look(*map(_line, range(30, 301, 30))) == ["60", "120", "240"]
    assert log.look(_line(480)) == ["60", "120", "240", "480"]


def test_a_line_that_is_not_whole_is_told_later(tmp_path: Path) -> None:
    log = _Log(tmp_path)
    assert log.look(_line(30), _line(60)[:-20]) == []
    assert log.look(_line(60)[-20:]) == ["60"]
    assert log.said[0].endswith(f"8 group_filter ({log.path})")


def test_other_waits_and_the_text_of_a_peer_are_not_told(tmp_path: Path) -> None:
    others = (_line(90, name="the evaluation"), _line(90, module="answers"), _line(90, begin="    "))
    assert _Log(tmp_path).look(*others) == []


def test_the_log_of_an_earlier_launcher_is_not_told(tmp_path: Path) -> None:
    log = _Log(tmp_path, before=_line(90))
    assert log.look() == []
    assert log.look(_line(60)) == ["60"]


def test_a_log_that_was_emptied_is_read_on(tmp_path: Path) -> None:
    log = _Log(tmp_path, before=_line(30) * 10)
    log.path.write_text("")
    assert log.look(_line(60)) == ["60"]


def test_no_log_is_no_wait(tmp_path: Path) -> None:
    said: list[str] = []
    LearnerLog(tmp_path / "none.log", said.append).look()
    assert said == []


def test_a_wait_without_a_worker_has_the_last_words_of_a_worker(tmp_path: Path) -> None:
    said: list[str] = []
    log = LearnerLog(tmp_path / "learner.log", said.append, worker=lambda: "rollout-0 says: waiting for a server")
    begin = "2026-01-02T03:04:05.678Z WARNING learner service: "
    lines = (
        "60 s without progress on the next batch: no rollout worker is connected",
        "120 s without progress on the next batch: 1",
    )
    (tmp_path / "learner.log").write_text("".join(f"{begin}{line}\n" for line in lines))
    log.look()
    assert [line.partition("learner.log)")[2] for line in said] == ["; rollout-0 says: waiting for a server", ""]


def test_a_resume_is_told_with_its_step_and_its_dropped_groups(tmp_path: Path) -> None:
    log = _Log(tmp_path)
    begin, why = "2026-01-02T03:04:05.006Z", "because step-000020 is damaged: no"
    told = (
        f"{begin} WARNING learner checkpoint: resume: from step 15 (steps lost: 5), {why}\n",
        f"{begin} WARNING learner resuming: resume: 3 of 8 groups under way do not fit\n",
    )
    log.look(*told, f"{begin} INFO    learner resuming: resume: learner.num_train_steps 20 -> 22 from step 15 on\n")
    assert log.said == [
        f"resume: from step 15 (steps lost: 5), {why}",
        "resume: 3 of 8 groups under way do not fit",
    ]
    assert log.resumed == [15]
