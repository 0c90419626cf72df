"""The list of system calls, interpreted as by the kernel, for both architectures on any machine."""

import re
import struct
from pathlib import Path

import pytest

from areal_rloo.errors import PreflightError
from areal_rloo.tasks.tools.seccomp import ALLOWED, RULED, THREADS, seccomp_filter

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
# Dangerous system calls: numbers on x86_64 and aarch64.
DANGEROUS = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "sendmsg": (46, 211), "bind": (49, 200),
    "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "ptrace": (101, 117), "process_vm_writev": (311, 271),
    "prctl": (157, 167), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "chroot": (161, 51),
    "bpf": (321, 280), "keyctl": (250, 219), "memfd_create": (319, 279), "setsid": (112, 157), "setrlimit": (160, 164),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchownat": (260, 54), "utimensat": (280, 88), "truncate": (76, 45),
    "linkat": (265, 37), "symlinkat": (266, 36), "mknodat": (259, 33), "shmget": (29, 194), "mq_open": (240, 180),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265)
}  # fmt: skip
RECENT = {"pidfd_open": 434, "clone3": 435, "openat2": 437, "io_uring_setup": 425, "io_uring_enter": 426, "later": 999}


def _verdict(program: bytes, machine: str, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Return the kernel's verdict on a call, by an interpreter of the six instructions in use."""
    data = struct.pack("=iIQ6Q", number, ARCHITECTURES[machine], 0, *(*arguments, *[0] * 6)[:6])
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator = position = 0
    while True:
        code, if_true, if_false, operand = instructions[position]
        position += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                position += if_true if accumulator == operand else if_false
            case 0x35:
                position += if_true if accumulator >= operand else if_false
            case _:
                assert code == 0x06, "no other instruction"
                return operand


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("threads", [False, True])
def test_calls_not_on_the_list_are_refused(machine: str, threads: bool) -> None:
    program, column = seccomp_filter(machine, threads=threads), list(ARCHITECTURES).index(machine)
    allowed = {numbers[column] for numbers in ALLOWED.values()} - {-1}
    ruled = {numbers[column] for numbers, _ in (RULED | THREADS).values()}
    assert not {numbers[column] for numbers in DANGEROUS.values()} & allowed
    for number in set(range(1000)) - ruled:
        expected = ALLOW if number in allowed else EPERM if number < 424 else ENOSYS
        assert _verdict(program, machine, number) == expected, number
    for name, number in RECENT.items():
        assert _verdict(program, machine, number) == ENOSYS, name
    assert _verdict(program, machine, 0x40000000 + 41) == KILL


def test_another_architecture_kills_the_program() -> None:
    assert _verdict(seccomp_filter("x86_64", threads=False), "aarch64", 0) == KILL
    assert _verdict(seccomp_filter("aarch64", threads=False), "x86_64", 63) == KILL


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "arguments", "verdict"),
    [
        ("fcntl", (3, 3), ALLOW),  # F_GETFL
        ("fcntl", (3, 8, 1), EPERM),  # F_SETOWN
        ("fcntl", (3, 10, 9), EPERM),  # F_SETSIG
        ("fcntl", (3, 15), EPERM),  # F_SETOWN_EX
        ("fcntl", (3, 1024), EPERM),  # F_SETLEASE
        ("ioctl", (0, 0x5401), ALLOW),  # TCGETS
        ("ioctl", (0, 0x5412), EPERM),  # TIOCSTI
        ("ioctl", (0, 0x1_0000_5412), EPERM),
        ("prlimit64", (0, 9, 0, 1 << 40), ALLOW),  # reads its own
        ("prlimit64", (1, 9, 0, 1 << 40), EPERM),  # reads another's
        ("prlimit64", (0, 9, 0x1000, 0), EPERM),  # writes
        ("prlimit64", (0, 9, 1 << 32, 0), EPERM),
        ("clone", (0x3D0F00,), ALLOW),  # a thread, as libc makes it
        ("clone", (17,), EPERM),  # fork
        ("clone", (0x4111,), EPERM),  # vfork
        ("clone", (0x10000 | 0x10000000,), EPERM),  # a thread in a user namespace
    ],
)
def test_calls_are_allowed_with_listed_arguments_only(
    machine: str, name: str, arguments: tuple[int, ...], verdict: int
) -> None:
    numbers, _ = (RULED | THREADS)[name]
    number = numbers[list(ARCHITECTURES).index(machine)]
    assert _verdict(seccomp_filter(machine, threads=True), machine, number, arguments) == verdict
    without = _verdict(seccomp_filter(machine, threads=False), machine, number, arguments)
    assert without == (EPERM if name == "clone" else verdict)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_call_numbers_match_the_kernel_headers(machine: str) -> None:
    if not HEADERS[machine].is_file():
        pytest.skip(f"no {HEADERS[machine]}")
    text, column = HEADERS[machine].read_text(), list(ARCHITECTURES).index(machine)
    kernel = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    kernel.setdefault("newfstatat", kernel.get("fstatat", -1))  # the name in the generic header
    ruled = {name: numbers for name, (numbers, _) in (RULED | THREADS).items()}
    for name, numbers in {**ALLOWED, **DANGEROUS, **ruled}.items():
        assert numbers[column] == kernel.get(name, -1), name


def test_an_architecture_without_numbers_is_refused() -> None:
    with pytest.raises(PreflightError, match="of x86_64 and aarch64, not of riscv64"):
        seccomp_filter("riscv64", threads=False)
