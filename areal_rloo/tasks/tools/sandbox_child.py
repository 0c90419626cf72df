"""The process of one sandboxed program: gives up its rights, then runs `program.py` of the folder it stands in.

In: the path of a file with `Orders`. Out: a zero byte on stdout when nothing can be given up any more, and from there
on what the program prints; the exit status says how it ended. Run by its path and imports next to nothing, because it
is started for every call: no package of ours, no site.

Each lock stays for good. The order matters: limits and files first, the list of system calls last, because it refuses
the calls that the others are made of.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import struct
import sys
from types import ModuleType, TracebackType

TYPE_CHECKING = False  # typing, and signal for one number, would take as long as Python's own start
if TYPE_CHECKING:
    from areal_rloo.tasks.tools.orders import Orders

LOCKED = b"\0"  # on stdout before anything of the program
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
    with open(sys.argv[1], "rb") as file:  # noqa: PTH123  # pathlib costs more than all the rest
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
    _run(orders["program"])


def _run(program: str) -> None:
    """As `python program.py` would."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    with open(program, "rb") as file:  # noqa: PTH123
        source = file.read()
    code = compile(source, program, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # what all this is for


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback of the program alone, and an exit status of its own for too little memory."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
    if issubclass(kind, MemoryError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(OUT_OF_MEMORY)


def _lock(orders: Orders) -> None:
    """Every lock, or an OSError that names the one that failed."""
    libc = ctypes.CDLL(None, use_errno=True)
    _die_with(orders["parent"], libc)
    for which, soft, hard in orders["limits"]:
        most = resource.getrlimit(which)[1]  # a lower limit that already holds stays
        resource.setrlimit(which, (soft, hard) if most < 0 else (min(soft, most), min(hard, most)))
    _drop_capabilities(libc)
    # A core that goes to a program of the system's has no limit but this.
    _checked("to dump no core", libc.prctl(_PR_SET_DUMPABLE, *map(ctypes.c_ulong, (0, 0, 0, 0))))
    _checked("no_new_privs", libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))
    _restrict_files(orders["ruleset"], orders["rules"], libc)
    _restrict_calls(orders["filter"], libc)


def _die_with(parent: int, libc: ctypes.CDLL) -> None:
    kill = ctypes.c_ulong(_SIGKILL)
    _checked("the death with the parent", libc.prctl(_PR_SET_PDEATHSIG, kill, *map(ctypes.c_ulong, (0, 0, 0))))
    if os.getppid() != parent:  # it died before it could have been told of
        os._exit(NOT_LOCKED)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Root's rights, so that no limit can be lifted; whoever has none keeps none."""
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


def _checked(what: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"the kernel refused {what}: {os.strerror(code)}")
    return result


if __name__ == "__main__":
    main()
