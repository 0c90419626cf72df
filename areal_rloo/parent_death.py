"""Linux sends a process a signal when the parent dies, at the request of the process.

Every process of the package makes the request here, except a program in the sandbox (`tasks/tools/sandbox_child.py`)
and a keeper (`keeper.py`), which do not import the package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1

# Runs in the new process before the command: between fork and exec, Python is not safe in a parent with threads. If the
# parent died before the request, Linux sends no signal, so the process exits. Ray blocks SIGINT; undo that.
_WRAPPER = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(sys.argv[2]))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.getppid() == int(sys.argv[1]) or sys.exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def signal_on_parent_death(number: int) -> None:
    """Ask Linux to send this process a signal when the parent thread ends; other systems have no such request."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def bound_to_this_process(command: Sequence[str], number: signal.Signals) -> tuple[str, ...]:
    """Wrap a command: the process gets a signal when the starting thread ends."""
    if sys.platform != "linux":
        return tuple(command)
    return (sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), str(int(number)), *command)
