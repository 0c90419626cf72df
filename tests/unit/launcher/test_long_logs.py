"""Output without end: the log stays bounded, and keeps its beginning and the end of the process."""

import sys
from pathlib import Path

import pytest
from support.patience import eventually
from support.process_specs import make_spec

from areal_rloo.launcher import supervisor
from areal_rloo.launcher.long_logs import last_line, shorten
from areal_rloo.launcher.processes import LocalStarter, Tail
from areal_rloo.launcher.supervisor import Supervisor

MOST = 2**20
FLOOD = "print('the first line'); [print('x' * 99) for _ in range(1_000_000)]; raise ValueError('the last words')"


def test_a_process_that_prints_100_mb_has_a_bounded_log_with_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MOST_BYTES", MOST)
    processes = Supervisor(LocalStarter(1.0), tmp_path, goodbye_s=1.0)
    processes.start(make_spec(sys.executable, "-u", "-c", FLOOD))
    log = tmp_path / "one.out"

    def has_ended() -> bool:
        processes.shorten_logs()
        return processes.exit_code("one") is not None

    eventually(has_ended, "the process ends")
    processes.shorten_logs()
    text = log.read_text()
    assert len(text) <= MOST
    assert text.startswith("the first line\n")
    assert "bytes of output are left out]" in text
    assert "Traceback" in text
    assert processes.last_words("one") == "ValueError: the last words"
    processes.stop_all(1.0)


def test_a_log_within_the_limit_stays_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "out"
    shorten(log, MOST)
    assert not log.exists()
    log.write_bytes(b"y" * MOST)
    shorten(log, MOST)
    assert log.read_bytes() == b"y" * MOST


def test_a_reader_of_the_end_goes_on_after_the_log_is_shortened(tmp_path: Path) -> None:
    log = tmp_path / "out"
    log.write_bytes(b"y" * 2 * MOST)
    tail = Tail(log)
    shorten(log, MOST)
    tail.read()
    with log.open("ab") as file:
        file.write(b"later\n")
    assert tail.read() == "later\n"


def test_the_last_line_of_a_log_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_line(path) == ""
    path.write_text("one\n" * 3000 + "two\nhalf")
    assert last_line(path) == "two"
