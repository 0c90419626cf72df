"""Programs that were started with closed standard streams."""

import subprocess
import sys
from pathlib import Path

import pytest

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
