"""Shorten the output of a process with endless output: keep the beginning and the end. Also: the last line of a log.

The launcher calls this in the loop around all processes. The file belongs to the process, which never waits: a
pipe with a reader in between would block the process if the reader hangs, and kill the process if the reader dies. A
process appends, so the next line lands at the new end of the file. A file within the limit is never touched.
"""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 64 * 2**20  # far more than the output of a long run: records are in files with limits of their own
_KEPT_SHARE = 8  # at each end
_LINE_BYTES = 4096
_MOST_READS = 100  # until the process pauses


def last_line(path: Path) -> str:
    """Return the last whole line of a log; empty if there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LINE_BYTES))
            lines = file.read().decode(errors="replace").rpartition("\n")[0].splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def shorten(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Leave out the middle of a long file. Lines of a few microseconds may get lost, or change places.

    Raises:
        OSError: the file cannot be read or written now; it may be longer than before.
    """
    if not path.exists() or (num_bytes := path.stat().st_size) <= most_bytes:
        return
    kept = most_bytes // _KEPT_SHARE
    with path.open("r+b") as file, path.open("ab", buffering=0) as appended:
        file.seek(num_bytes - kept)
        end = file.read()
        for _ in range(_MOST_READS):
            fresh = file.read()
            if not fresh:
                break
            end = (end + fresh)[-kept:]
        os.ftruncate(file.fileno(), kept)
        appended.write(b"\n[%d bytes of output are left out]\n" % (file.tell() - kept - len(end)) + end)
