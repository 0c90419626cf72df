"""Logs: a line per record, with separate parts."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal_rloo.errors import EXIT_UNSAVED, ArealRlooError, ConfigError, TrainingError
from areal_rloo.telemetry.logs import MOST_LINES, MOST_MINUTE, LimitedHandler, get_logger, run_to_exit_code, setup_logs

LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z (?P<level>\w+) +(?P<process>\S+) (?P<module>\w+): (?P<text>.*)"
)


def test_a_line_has_time_level_process_module_and_message(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "learner.log"
    setup_logs("learner", level="info", file=file)
    get_logger(__name__).info("version %d is out", 3)
    found = LINE.fullmatch(file.read_text().rstrip("\n"))
    assert found is not None
    assert found.group("level", "process", "text") == ("INFO", "learner", "version 3 is out")
    assert found.group("module") == Path(__file__).stem


def test_records_below_the_level_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    setup_logs("learner", level="warning", file=file)
    get_logger("areal_rloo.learner").info("no")
    get_logger("areal_rloo.learner").warning("yes")
    assert [line.rpartition(": ")[2] for line in file.read_text().splitlines()] == ["yes"]


def test_an_exception_comes_with_its_traceback(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    setup_logs("learner", level="info", file=file)
    try:
        raise ValueError("the cause")
    except ValueError:
        get_logger(__name__).exception("it failed")
    text = file.read_text()
    assert "it failed" in text
    assert "ValueError: the cause" in text
    assert "Traceback" in text


def test_a_file_is_appended_to_and_a_second_setup_replaces_the_first(tmp_path: Path) -> None:
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    setup_logs("learner", level="info", file=first)
    get_logger(__name__).info("one")
    setup_logs("learner", level="info", file=first)
    get_logger(__name__).info("two")
    setup_logs("learner", level="info", file=second)
    get_logger(__name__).info("three")
    assert [line[-3:] for line in first.read_text().splitlines()] == ["one", "two"]
    assert len(second.read_text().splitlines()) == 1


def test_standard_error_gets_the_same_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.log"
    setup_logs("rollout-0", level="info", file=file, to_stderr=True)
    get_logger(__name__).error("gone")
    assert capfd.readouterr().err == file.read_text()
    setup_logs("rollout-0", level="info", file=None)
    get_logger(__name__).error("unheard")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("error", "code"), [(ConfigError("run.seed: no"), 2), (TrainingError("not finite"), 1)])
def test_our_errors_are_logged_as_one_line_and_give_the_exit_code(
    error: ArealRlooError, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        raise error

    file = tmp_path / "learner.log"
    setup_logs("learner", level="info", file=file)
    assert run_to_exit_code(run) == code
    assert capsys.readouterr().err == f"error: {error}\n"
    assert str(error) in file.read_text()
    assert run_to_exit_code(lambda: 0) == 0


def test_any_other_exception_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_to_exit_code(lambda: 1 // 0)


def test_a_full_disk_under_the_output_keeps_the_exit_code() -> None:
    code = (
        "import sys\nfrom areal_rloo.errors import UnsavedError\n"
        "from areal_rloo.telemetry.logs import run_to_exit_code\n"
        "def run():\n    raise UnsavedError('not saved')\nsys.exit(run_to_exit_code(run))"
    )
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, check=False)
    assert ended.returncode == EXIT_UNSAVED


def test_a_line_that_repeats_without_end_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    setup_logs("learner", level="info", file=file)
    for number in range(5000):
        get_logger(__name__).warning("refused: %d", number)
    get_logger(__name__).info("another line")
    setup_logs("learner", level="info", file=None)  # ends the minute
    lines = file.read_text().splitlines()
    assert len(lines) == MOST_LINES + 2
    assert lines[MOST_LINES].endswith("another line")
    assert lines[-1].endswith(f"left out {5000 - MOST_LINES} records within a minute like: refused: 0")


def test_long_records_of_a_line_are_limited_by_their_characters(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    setup_logs("learner", level="info", file=file)
    for _ in range(MOST_LINES):
        get_logger(__name__).warning("a text of a peer: %s", "x" * 15_000)
    setup_logs("learner", level="info", file=None)  # ends the minute
    assert MOST_MINUTE <= file.stat().st_size <= MOST_MINUTE + 40_000
    assert "left out 86 records within a minute like: a text of a peer" in file.read_text().splitlines()[-1]


def test_a_line_is_written_again_after_a_minute() -> None:
    written: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())

    now_s = 0.0
    handler = LimitedHandler([Kept()], clock=lambda: now_s)
    for _ in range(2):
        for number in range(MOST_LINES + 1):
            handler.handle(logging.makeLogRecord({"msg": f"refused: {number}"}))
        now_s += 60.0
    assert len(written) == 2 * MOST_LINES + 1
    assert written[MOST_LINES : MOST_LINES + 2] == [
        "left out 1 records within a minute like: refused: 0",
        "refused: 0",
    ]


def test_a_long_record_keeps_both_ends(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    setup_logs("learner", level="info", file=file)
    get_logger(__name__).info("begins %s ends", "x" * 1_000_000)
    text = file.read_text()
    assert len(text) < 25_000
    assert "begins" in text
    assert text.endswith("ends\n")


FORGED = "x\r\n2026-11-25T00:00:00.000Z ERROR   learner loop: LOST\x1b[2J\x1b]0;owned\x07\x85\u2028\u202e\ud800\ttab"


def test_text_of_a_peer_forges_no_record_and_no_escape(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.log"
    setup_logs("learner", level="info", file=file, to_stderr=True)
    get_logger(__name__).info("%s says hello", FORGED)
    try:
        raise ValueError(FORGED)
    except ValueError:
        get_logger(__name__).exception("it failed")
    text = file.read_bytes().decode()
    assert capfd.readouterr().err == text
    assert sum(LINE.fullmatch(line) is not None for line in text.splitlines()) == 2
    assert "\\x1b[2J" in text
    assert all(c.isprintable() or c in "\n\t" for c in text)


def test_an_error_with_a_forged_line_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise TrainingError(FORGED)

    setup_logs("learner", level="info", file=tmp_path / "learner.log")
    assert run_to_exit_code(run) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
