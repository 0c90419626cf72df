"""Programs that were started with closed standard streams."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_rloo.standard_streams import patient

OPENS = """
import sys
from pathlib import Path
from areal_rloo.standard_streams import open_missing_streams
open_missing_streams()
with open(sys.argv[1], "w") as file:
    for number in range(3):
        print(Path(f"/proc/self/fd/{number}").readlink(), file=file)
print("discarded")
print("discarded", file=sys.stderr)
assert sys.stdin.read() == ""
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_become_the_null_device(tmp_path: Path, closed: str) -> None:
    output = tmp_path / "streams"
    command = ["bash", "-c", f'exec "$@" {closed}', "closed", sys.executable, "-c", OPENS, str(output)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for number, name in enumerate(output.read_text().split()):
        is_closed = ("<&-", " >&-", "2>&-")[number] in f" {closed}"
        assert (name == "/dev/null") is (is_closed or number == 0), f"stream {number}"


STAMPS = """
import sys
from rich.console import Console
from areal_rloo.standard_streams import stamp_lines
stamp_lines()
print("one", end="")
print(" line\\nand", "another")
print(file=sys.stderr)
Console().print("from rich")
sys.stdout.flush()
raise SystemExit("the end")
"""


def test_each_line_of_a_batch_job_has_its_time() -> None:
    ended = subprocess.run([sys.executable, "-c", STAMPS], capture_output=True, text=True, check=False)
    stamp = r"20\d\d-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-6]\dZ "
    expected = re.compile(f"{stamp}one line\n{stamp}and another\n{stamp}from rich\n")
    assert expected.fullmatch(ended.stdout), ended.stdout
    assert re.fullmatch(f"{stamp}\n{stamp}the end\n", ended.stderr), ended.stderr


def test_a_reader_that_stands_still_holds_up_no_writer() -> None:
    """Ctrl-S on the terminal of a run stopped the launcher, which then restarted no worker and took no signal."""
    reader, terminal = pty.openpty()
    stream = patient(os.fdopen(terminal, "w", encoding="utf-8"))
    print("before", file=stream, flush=True)
    os.write(reader, b"\x13")  # Ctrl-S
    for number in range(100):
        print(f"line {number}", file=stream, flush=True)
    os.write(reader, b"\x11")  # Ctrl-Q
    print("after", file=stream, flush=True)
    seen = b""
    while b"after" not in seen:
        seen += os.read(reader, 65536)
    assert seen.split() == b" ".join([b"before", *(b"line %d" % n for n in range(100)), b"after"]).split()
    os.close(reader)


def test_a_reader_that_stands_still_takes_no_memory() -> None:
    reader, writer = os.pipe()
    stream = patient(os.fdopen(writer, "w", encoding="utf-8"))
    for _ in range(100):
        print("x" * 10_000, file=stream, flush=True)
    os.set_blocking(reader, False)
    seen, until_s = 0, time.monotonic() + 1.0
    while time.monotonic() < until_s:
        with contextlib.suppress(BlockingIOError):
            seen += len(os.read(reader, 2**16))
    assert 2**16 <= seen < 2**18  # of a million bytes
    os.close(reader)


def test_a_file_is_written_at_once(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        assert patient(file) is file
