"""The exit code of a child whose session is killed: the process id is ours only until the child is reaped."""

from __future__ import annotations

import os
import subprocess
import sys


def exit_code_of(child: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a child, in Popen's form, without reaping the child; None while the child runs.

    Linux gives the id of an unreaped child to no other process or session, so `os.killpg` cannot hit a stranger.
    """
    if child.returncode is not None or sys.platform != "linux":
        return child.poll()
    try:
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # another thread has reaped the child
        return child.poll()
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
