"""The system calls of a sandboxed program, as a filter for the kernel (seccomp-BPF).

In: the machine's architecture and whether threads are allowed. Out: the bytes of a BPF program. The filter lists
allowed calls, so it refuses unknown calls and calls of future kernels.

The list excludes sockets, processes and signals. It also excludes calls by path or process id that Landlock does not
cover (chmod, chown, utime, xattr, truncate, prlimit, setpriority, inotify), memory outside all limits (memfd_create,
System V shared memory, pipes), prctl (which could cancel the death signal of the parent) and io_uring.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from areal_rloo.errors import PreflightError

_LOAD, _AND = 0x20, 0x54  # BPF_LD | BPF_W | BPF_ABS, BPF_ALU | BPF_AND | BPF_K
_IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x15, 0x35, 0x06  # BPF_JMP | BPF_JEQ, BPF_JMP | BPF_JGE, BPF_RET
_ALLOW, _KILL = 0x7FFF0000, 0x80000000  # SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS
_REFUSE, _NOT_THERE = 0x00050001, 0x00050026  # SECCOMP_RET_ERRNO with EPERM, with ENOSYS
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # the bit of the x32 ABI, which has other numbers for the same calls
# Calls from this number on fail with ENOSYS, as on an older kernel. Libraries then fall back to an older call (clone3:
# clone), which the filter checks by arguments; after EPERM they would give up. All architectures share these numbers.
_FIRST_RECENT = 424

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH_*

_ABSENT = -1  # the architecture has no such call
# Name: number on x86_64, number on aarch64.
ALLOWED: Mapping[str, tuple[int, int]] = {
    # Files. Landlock decides which files.
    "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "preadv": (295, 69),
    "write": (1, 64), "writev": (20, 66), "pwrite64": (18, 68), "pwritev": (296, 70),
    "lseek": (8, 62), "open": (2, _ABSENT), "openat": (257, 56), "close": (3, 57), "close_range": (436, 436),
    "dup": (32, 23), "dup2": (33, _ABSENT), "dup3": (292, 24), "ftruncate": (77, 46), "umask": (95, 166),
    "getdents": (78, _ABSENT), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "rename": (82, _ABSENT), "renameat": (264, 38), "renameat2": (316, 276),
    "unlink": (87, _ABSENT), "unlinkat": (263, 35),
    # Metadata of files, which Landlock does not cover: see "Not covered" in sandbox.py.
    "stat": (4, _ABSENT), "fstat": (5, 80), "lstat": (6, _ABSENT), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, _ABSENT), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, _ABSENT), "readlinkat": (267, 78),
    # Memory.
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "madvise": (28, 233),
    # Its own signals.
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "pause": (34, _ABSENT), "alarm": (37, _ABSENT),
    "setitimer": (38, 103), "getitimer": (36, 102),
    # Time and waiting.
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, _ABSENT), "times": (100, 153), "restart_syscall": (219, 128),
    "select": (23, _ABSENT), "pselect6": (270, 72), "poll": (7, _ABSENT), "ppoll": (271, 73), "futex": (202, 98),
    # Itself and the machine.
    "exit": (60, 93), "exit_group": (231, 94), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173),
    "getpgrp": (111, _ABSENT), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "sysinfo": (99, 179), "uname": (63, 160), "getrandom": (318, 278), "set_robust_list": (273, 99), "rseq": (334, 293),
}  # fmt: skip


class Test(NamedTuple):
    """A test of a call's arguments: a 32-bit word, under a mask, must equal one of some values."""

    word_index: int  # 2 * the argument's index, and 1 more for its upper half
    mask: int
    values: tuple[int, ...]


_Ruled = tuple[tuple[int, int], tuple[Test, ...]]  # the numbers, and tests that must all pass
_WHOLE = 0xFFFFFFFF
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020080  # every CLONE_NEW*
# Calls allowed with certain arguments.
RULED: Mapping[str, _Ruled] = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; F_SETOWN and F_SETSIG would send signals to others.
    "fcntl": ((72, 25), (Test(2, _WHOLE, (0, 1, 2, 3, 4, 1030)),)),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX: requests of Python for each open file.
    "ioctl": ((16, 29), (Test(2, _WHOLE, (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)),)),
    # Reading the limits of the process itself: process 0, and no new value (a null pointer of two words).
    "prlimit64": ((302, 261), (Test(0, _WHOLE, (0,)), Test(4, _WHOLE, (0,)), Test(5, _WHOLE, (0,)))),
}
THREADS: Mapping[str, _Ruled] = {
    "clone": ((56, 220), (Test(0, _CLONE_THREAD | _CLONE_NAMESPACES, (_CLONE_THREAD,)),)),
}


def seccomp_filter(machine: str, *, threads: bool) -> bytes:
    """Make the filter for an architecture, as an array of `struct sock_filter`.

    Raises:
        PreflightError: the architecture is not supported.
    """
    if machine not in _ARCHITECTURES:
        raise PreflightError(
            f"the sandbox knows the system calls of {' and '.join(_ARCHITECTURES)}, not of {machine}; "
            "run the tool 'python' and the task 'code' on such a machine"
        )
    column, architecture = _ARCHITECTURES[machine]
    # Another ABI on the same machine (32-bit calls on x86_64) has other numbers for the same calls.
    program = [_op(_LOAD, _ARCHITECTURE), _op(_IF_EQUAL, architecture, 1, 0), _op(_RETURN, _KILL)]
    program += [_op(_LOAD, _NUMBER), _op(_IF_AT_LEAST, _X32, 0, 1), _op(_RETURN, _KILL)]
    for numbers in ALLOWED.values():
        if numbers[column] != _ABSENT:
            program += [_op(_IF_EQUAL, numbers[column], 0, 1), _op(_RETURN, _ALLOW)]
    for numbers, tests in ({**RULED, **THREADS} if threads else RULED).values():
        body = [op for test in tests for op in _tested(test)] + [_op(_RETURN, _ALLOW)]
        program += [_op(_IF_EQUAL, numbers[column], 0, len(body)), *body]
    program += [_op(_IF_AT_LEAST, _FIRST_RECENT, 0, 1), _op(_RETURN, _NOT_THERE), _op(_RETURN, _REFUSE)]
    return b"".join(program)


def _tested(test: Test) -> list[bytes]:
    """Continue if the word equals one of the values, else refuse."""
    count = len(test.values)
    jumps = [_op(_IF_EQUAL, value, count - index, 0) for index, value in enumerate(test.values)]
    return [_op(_LOAD, _ARGUMENTS + 4 * test.word_index), _op(_AND, test.mask), *jumps, _op(_RETURN, _REFUSE)]


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode an instruction; the jumps count instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, operand)
