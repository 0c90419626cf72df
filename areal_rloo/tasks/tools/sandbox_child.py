"""The process of a sandboxed program: gives up rights, then runs `program.py` in the current folder.

In: the path of a file with `Orders`. Out: a zero byte on stdout after the last lock, then the output of the program;
the exit status tells how the program ended. Started by path for every call, so this file imports little: neither this
package nor `site`.

No lock can be removed. The order matters: limits and files first, system calls last, because the list of system calls
refuses the calls that set the other locks.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import struct
import sys
from types import ModuleType, TracebackType

TYPE_CHECKING = False  # `typing`, and `signal` for a number, would double the start time
if TYPE_CHECKING:
    from typing import TypedDict

    class Orders(TypedDict):
        """Written by `sandbox.py` with marshal: both processes run the same Python, and marshal needs no import."""

        parent: int  # the process to die with
        program: str  # file name of the program, in the child's folder
        package_folders: list[str]
        ruleset: bytes  # struct landlock_ruleset_attr
        rules: list[tuple[str, int]]  # a path, the rights beneath this path
        filter: bytes  # an array of struct sock_filter
        limits: list[tuple[int, int, int]]  # a resource, the soft limit, the hard limit


LOCKED = b"\0"  # on stdout before the program's output
OUT_OF_MEMORY = 77  # exit statuses
NOT_LOCKED = 78

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH
_CAPABILITY_VERSION = 0x20080522
_MAY_READ = 1 << 2  # CAP_DAC_READ_SEARCH: root in a container may need it to reach its own Python


def main() -> None:
    with open(sys.argv[1], "rb") as file:  # noqa: PTH123  # pathlib costs more than all other imports
        orders: Orders = marshal.load(file)
    try:
        _lock(orders)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NOT_LOCKED)
    os.write(1, LOCKED)
    sys.argv = [orders["program"]]
    sys.path += orders["package_folders"]
    sys.excepthook = _tell
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    module = sys.modules["__main__"] = ModuleType("__main__")  # as with `python program.py`
    with open(orders["program"], "rb") as file:  # noqa: PTH123
        code = compile(file.read(), orders["program"], "exec", dont_inherit=True)
    exec(code, module.__dict__)  # the purpose of the sandbox


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback without frames of this file; exit with a separate status for too little memory."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
    if issubclass(kind, MemoryError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(OUT_OF_MEMORY)


def _lock(orders: Orders) -> None:
    """Set every lock; raise an OSError that names the failed lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, "the death with the parent", _PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != orders["parent"]:  # the parent died before the call above
        os._exit(NOT_LOCKED)
    for which, soft, hard in orders["limits"]:
        most = resource.getrlimit(which)[1]  # keep a lower existing limit
        resource.setrlimit(which, (soft, hard) if most < 0 else (min(soft, most), min(hard, most)))
    _drop_capabilities(libc)
    # Only this setting stops core dumps that the system pipes to a program.
    _prctl(libc, "to dump no core", _PR_SET_DUMPABLE, 0)
    _prctl(libc, "no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    _restrict_files(orders["ruleset"], orders["rules"], libc)
    _restrict_calls(orders["filter"], libc)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop the rights of root, so no limit can be raised."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    sets = ctypes.create_string_buffer(24)  # effective, permitted, inheritable; twice, for 64 bits
    _checked("capget", libc.capget(header, sets))
    held = struct.unpack("=6I", sets.raw)
    kept = held[1] & _MAY_READ
    _checked("capset", libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)))


def _restrict_files(attributes: bytes, rules: list[tuple[str, int]], libc: ctypes.CDLL) -> None:
    syscall = libc.syscall
    syscall.restype = ctypes.c_long
    length, none = ctypes.c_size_t(len(attributes)), ctypes.c_long(0)
    made = _checked("a Landlock ruleset", syscall(ctypes.c_long(_CREATE_RULESET), attributes, length, none))
    ruleset = ctypes.c_long(made)
    for path, rights in rules:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        beneath = struct.pack("=Qi", rights, folder)
        added = syscall(ctypes.c_long(_ADD_RULE), ruleset, ctypes.c_long(_BENEATH), beneath, none)
        _checked(f"a Landlock rule for {path}", added)
        os.close(folder)
    _checked("Landlock", syscall(ctypes.c_long(_RESTRICT_SELF), ruleset, none))
    os.close(made)


def _restrict_calls(program: bytes, libc: ctypes.CDLL) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    pointed = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions)))
    rest = (ctypes.c_ulong(_SECCOMP_MODE_FILTER), pointed, ctypes.c_ulong(0), ctypes.c_ulong(0))
    _checked("the list of system calls (seccomp)", libc.prctl(_PR_SET_SECCOMP, *rest))


def _prctl(libc: ctypes.CDLL, what: str, option: int, argument: int) -> None:
    _checked(what, libc.prctl(option, *map(ctypes.c_ulong, (argument, 0, 0, 0))))


def _checked(what: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"the kernel refused {what}: {os.strerror(code)}")
    return result


if __name__ == "__main__":
    main()
