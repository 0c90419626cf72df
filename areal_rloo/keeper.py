"""A keeper starts a command and outlives the command: everything that the command started ends with the command.

    starter ─► keeper ─► command ─► children, their children, and processes in sessions of their own
      output ◄─ bounded ◄─┴───────────────┘

The output and the errors of the command go through the keeper to the keeper's output, in bounded amounts: the code of a
user may print without end. The keeper reads all of it, so printing never blocks the command. A program that we trust (a
server) may write without the keeper.

The keeper kills all descendants when the command ends, when the starting thread ends, or on SIGTERM and signals like
it. Linux passes every orphan below the keeper on to the keeper (a "child subreaper"), so a new session or a double fork
hides no process. If the keeper itself is killed, the command ends, and other processes live on. A process of another
user, or started by another service for the command (systemd, docker, at), is out of reach.

Run by path, without this package and `site`, so a keeper starts in milliseconds and needs little memory.
"""

from __future__ import annotations

import _thread  # `threading` is slow to import
import ctypes
import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_S = 5.0  # a process in an uninterruptible system call ends later
_LOOK_S = 0.05
_LAST_OUTPUT_S = 1.0  # for the rest of the output; a process out of reach may keep the pipe open
_MOST_BYTES = 1 << 20  # of output at once; the rest is left out
_BYTES_PER_S = 1 << 10  # of output, on average
_PIECE_BYTES = 1 << 16
_INPUT, _OUTPUT, _ERRORS = 0, 1, 2
_BOUNDED = "bounded"
_SHORTAGES = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
TRY_AGAIN = 75  # exit code (EX_TEMPFAIL): the machine lacked something for a moment
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # by default, all end a process
_SIGNALS = (*_ENDS, signal.SIGCHLD)


def kept(command: Sequence[str], *, bounded: bool = True) -> tuple[str, ...]:
    """Wrap a command, to be started by this process; other systems than Linux have no keepers.

    `bounded`: the output goes through the keeper.
    """
    if sys.platform != "linux":
        return tuple(command)
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), _BOUNDED if bounded else "whole", *command)


def was_killed(code: int | None) -> bool:
    """Return whether the exit code of a kept process says that the machine or an operator ended the process.

    Other signals come from the command itself: its own code crashes. None: the kernel cannot end the process.
    """
    return code in (None, TRY_AGAIN) or -code in (signal.SIGKILL, signal.SIGQUIT, signal.SIGXCPU, *_ENDS)


def main() -> None:
    """Start the command; exit with the command's code after everything has ended, or with `TRY_AGAIN`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by some starters: then no end is told
    try:
        _keep()
    except (OSError, RuntimeError) as error:  # no process, no thread, no descriptor
        _write(f"a keeper cannot keep: {error}\n".encode())
        os._exit(TRY_AGAIN)  # the command, if there is one, is killed then


def _keep() -> None:
    starter, bounded, command = int(sys.argv[1]), sys.argv[2] == _BOUNDED, sys.argv[3:]
    libc = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != starter:  # the starter died before the request above
        os._exit(1)
    outlet, inlet = os.pipe()
    keeper, child = os.getpid(), os.fork()
    if child == 0:
        if bounded:
            os.dup2(inlet, _OUTPUT)
            os.dup2(inlet, _ERRORS)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != keeper:
            os._exit(1)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(_ERRORS, f"{command[0]}: {error}\n".encode())
            os._exit(TRY_AGAIN if error.errno in _SHORTAGES else 1)
    os.dup2(outlet, _INPUT)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the starter waits for the end of a socket of the command
    copied = _thread.allocate_lock()
    if bounded:
        copied.acquire()
        _thread.start_new_thread(_copy_output, (copied,))
    status = None
    while status is None and signal.sigwait(_SIGNALS) == signal.SIGCHLD:
        status, _ = _reaped(child)
    status = _kill_descendants(child, status)
    copied.acquire(timeout=_LAST_OUTPUT_S)
    _exit(status)


def _copy_output(copied: _thread.LockType) -> None:
    """Copy the output of the command until the end. After too much, leave out the output of about a minute."""
    allowed, left_out, last_s = float(_MOST_BYTES), 0, time.monotonic()
    while piece := os.read(_INPUT, _PIECE_BYTES):
        now_s = time.monotonic()
        allowed, last_s = min(_MOST_BYTES, allowed + (now_s - last_s) * _BYTES_PER_S), now_s
        if left_out and allowed >= _PIECE_BYTES:
            _write(b"\n[%d bytes of output are left out]\n" % left_out)
            left_out = 0
        passed = b"" if left_out else piece[: int(allowed)]
        _write(passed)
        allowed -= len(passed)
        left_out += len(piece) - len(passed)
    if left_out:
        _write(b"\n[%d bytes of output are left out]\n" % left_out)
    copied.release()


def _write(output: bytes) -> None:
    """Write output; without a reader or on a full disk, lose it."""
    try:
        while output:
            output = output[os.write(_OUTPUT, output) :]
    except OSError:
        return


def _reaped(child: int) -> tuple[int | None, bool]:
    """Reap all dead children; return the status of the command if it was among them, and whether children are left."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        if pid == child:
            status = ended


def _kill_descendants(child: int, status: int | None) -> int | None:
    """Kill until no descendant is left, as a process may fork meanwhile; return the status of the command."""
    ends_s = time.monotonic() + _KILL_S
    while time.monotonic() < ends_s:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # has ended, or runs as another user
                continue
        ended, others = _reaped(child)
        status = ended if status is None else status
        if not others:
            break
        signal.sigtimedwait((signal.SIGCHLD,), _LOOK_S)
    return status


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - pathlib is slow to import
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # has ended
            continue
        children.setdefault(parent, []).append(int(name))
    found = children.get(root, [])
    for pid in found:  # grows
        found += children.get(pid, [])
    return found


def _exit(status: int | None) -> None:
    """Exit as the command did, also by a signal."""
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped the core already
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
