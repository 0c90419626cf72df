"""Hostile programs, really executed: no access outside, nothing left behind, no program after its deadline."""

import asyncio
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import command_of

from areal_rloo.errors import PreflightError
from areal_rloo.tasks.tools import landlock
from areal_rloo.tasks.tools.sandbox import SandboxLimits, SandboxResult, run_python


def _missing() -> str:
    """Skip only if the kernel lacks a feature; any other failure of the sandbox fails the test."""
    try:
        landlock.landlock_version()
    except PreflightError as error:
        return str(error)
    return "" if "\nSeccomp:" in Path("/proc/self/status").read_text() else "the kernel has no seccomp"


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "nothing is missing")


def _children() -> list[psutil.Process]:
    every = psutil.Process().children(recursive=True)
    return [child for child in every if "sandbox_child" in " ".join(command_of(child))]


def _locked() -> list[psutil.Process]:
    """Find children that already run the program."""
    return [child for child in _children() if "Seccomp:\t2" in _status(child)]


def _status(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/status").read_text()


def _owner(process: psutil.Process) -> int:
    return Path(f"/proc/{process.pid}/status").stat().st_uid


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The parent of scratch folders; after every test, no folder and no process may be left."""
    made = tmp_path / "folders"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    yield made
    _assert_nothing_is_left(made)


def _assert_nothing_is_left(made: Path) -> None:
    assert list(made.iterdir()) == []
    assert _children() == []


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "keys" / "secret"
    path.parent.mkdir(parents=True)
    path.write_text("the secret")
    path.chmod(0o644)
    return path


def _run(code: str, **limits: float) -> SandboxResult:
    return asyncio.run(run_python(code, SandboxLimits(**limits)))  # type: ignore[arg-type]


def _assert_refused(attempt: str, error: str = "PermissionError") -> None:
    result = _run(f"{attempt}\nprint('escaped')")
    assert "escaped" not in result.stdout, attempt
    assert error in result.stderr, result.text


LIBC = "import ctypes, os, errno; libc = ctypes.CDLL(None, use_errno=True)\n"
CALLED = "\nif result < 0: raise OSError(ctypes.get_errno(), 'refused')"


@pytest.mark.parametrize(
    "attempt",
    [
        "open('{keys}').read()",
        "import os; os.listdir('{folder}')",
        "import os; os.open('{keys}', os.O_WRONLY)",
        "import os; os.open('{keys}', os.O_RDWR | os.O_TRUNC)",
        "open('{folder}/more', 'w')",
        "import os; os.chdir('{folder}'); open('secret').read()",
        "import os; fd = os.open('{folder}', os.O_PATH); os.open('secret', os.O_RDONLY, dir_fd=fd)",
        "import os; os.rename('{keys}', 'mine')",
        "import os; os.link('{keys}', 'mine')",
        "import os; os.symlink('{keys}', 'mine'); open('mine').read()",
        "import os; os.unlink('{keys}')",
        "import os; os.rmdir('{folder}')",
        "import os; os.mkdir('{folder}/more')",
        "import os; os.mkfifo('{folder}/more')",
        "import os; os.chmod('{keys}', 0o777)",
        "import os; os.chown('{keys}', 0, 0)",
        "import os; os.utime('{keys}')",
        "import os; os.truncate('{keys}', 0)",
        "import os; os.setxattr('{keys}', 'user.mine', b'x')",
        LIBC + "result = libc.open(b'{keys}', 0)" + CALLED,
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "import os; open(f'/proc/{{os.getppid()}}/environ').read()",
        "import os; os.readlink(f'/proc/{{os.getppid()}}/exe')",
        "open('/proc/1/cmdline').read()",
        "import os; os.listdir('/')",
        "import os; os.listdir('/dev/shm')",
        "open('/dev/zero').read(1)",
        "import os; os.listdir('..')",
        "open('../orders', 'rb').read()",
        "import os; os.mkdir('more')",
        "import os; os.mknod('more', 0o20666, os.makedev(1, 1))",
        "import os; os.chmod(os.__file__, os.stat(os.__file__).st_mode)",
        "import os; os.open(os.__file__, os.O_WRONLY | os.O_APPEND)",
    ],
)
def test_no_outside_file_is_read_or_changed(attempt: str, keys: Path) -> None:
    before = keys.stat()
    _assert_refused(attempt.format(keys=keys, folder=keys.parent))
    assert keys.read_text() == "the secret"
    assert (keys.stat().st_mode, keys.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert list(keys.parent.iterdir()) == [keys]


def test_nothing_is_inherited_but_the_standard_streams(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "the secret")
    program = """
import os, ctypes
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
print([fd for fd in range(1024) if is_open(fd)], sorted(os.environ))
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
print(libc.getenv(b"HF_TOKEN"), os.read(0, 1))
"""
    stdin = os.dup(0)
    with keys.open() as held:
        os.set_inheritable(held.fileno(), True)
        os.dup2(held.fileno(), 0)
        result = _run(program)
        os.dup2(stdin, 0)
    os.close(stdin)
    assert result.exit_reason == "ok", result.text
    names, secret = result.stdout.splitlines()
    assert names.startswith("[0, 1, 2] ")
    assert "HF_TOKEN" not in names
    assert secret == "None b''"


_FAMILIES = ["INET", "INET6", "UNIX", "NETLINK", "PACKET", "VSOCK", "ALG"]
_SYSCALL = LIBC + "libc.syscall.restype = ctypes.c_long\nresult = libc.syscall({}, 0, 0, 0, 0, 0)" + CALLED
_NUMBERS = {  # x86_64; the tests of the filter cover both architectures
    "socket": 41, "memfd_create": 319, "shmget": 29, "ptrace": 101, "process_vm_readv": 310, "keyctl": 250, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "mount": 165, "unshare": 272, "setns": 308, "vfork": 58, "execve": 59,
    "setsid": 112, "prctl": 157, "seccomp": 317, "personality": 135, "inotify_init": 253, "eventfd": 284, "pipe": 22,
    "open_by_handle_at": 304, "sched_setaffinity": 203, "mlockall": 151, "setuid": 105, "syslog": 103, "msgget": 68,
}  # fmt: skip
_NOT_THERE = {"io_uring_setup": 425, "clone3": 435, "pidfd_open": 434, "open_tree": 428, "not yet made": 4000}


@pytest.mark.parametrize("family", _FAMILIES)
def test_no_socket_is_made(family: str) -> None:
    _assert_refused(f"import socket; socket.socket(socket.AF_{family}, socket.SOCK_DGRAM)")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
def test_system_calls_outside_python_are_refused() -> None:
    program = (
        LIBC
        + f"""
libc.syscall.restype = ctypes.c_long
for name, number in { ({**_NUMBERS, **_NOT_THERE})!r}.items():
    print(name, libc.syscall(number, 0, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()], sep=":")
"""
    )
    expected = [f"{name}:-1:EPERM" for name in _NUMBERS] + [f"{name}:-1:ENOSYS" for name in _NOT_THERE]
    assert _run(program).stdout.splitlines() == expected


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an ABI of x86_64")
@pytest.mark.parametrize("code", ["b829000040", "b814000000cd80c3"], ids=["x32", "32-bit"])
def test_system_calls_of_another_abi_kill_the_program(code: str) -> None:
    """Call socket by the x32 number through `syscall`, and getpid by the 32-bit number through `int 0x80`."""
    code = code if code.endswith("c3") else code + "0f05c3"
    program = f"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("{code}"))
ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("escaped")
"""
    result = _run(program)
    assert (result.stdout, result.exit_reason) == ("", "killed")
    assert "SIGSYS" in result.detail or "SIGSEGV" in result.detail, "SIGSEGV where the kernel has no 32-bit calls"


@pytest.mark.parametrize(
    "attempt",
    [
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.kill(os.getpid(), 19)",
        "import os; os.killpg(0, 0)",
        "import os; os.kill(-1, 0)",
        "import signal; signal.raise_signal(signal.SIGSTOP)",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import os; os.sched_setaffinity(os.getppid(), [0])",
        "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
        "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "import fcntl, signal; fcntl.fcntl(0, 10, signal.SIGKILL)",
        "import fcntl, os; fcntl.ioctl(1, 0x8901, os.getppid().to_bytes(4, 'little'))",
        "import os; os.fork()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.setsid()",
        LIBC + "result = libc.prctl(1, 0, 0, 0, 0)" + CALLED,
    ],
)
def test_no_other_process_is_touched_or_started(attempt: str) -> None:
    _assert_refused(attempt)


def test_a_fork_bomb_and_a_daemon_leave_nothing_behind() -> None:
    program = """
import os, time
for _ in range(50):
    try:
        if os.fork() == 0: os.setsid(), os.fork(), time.sleep(20), os._exit(0)
    except OSError as error: last = error
print(last)
"""
    assert "Operation not permitted" in _run(program).stdout


def test_root_keeps_only_the_capability_to_read() -> None:
    """Read the capabilities from /proc, outside the program."""

    async def scenario() -> dict[str, str]:
        task = asyncio.create_task(run_python("import time; time.sleep(1000)", SandboxLimits(wall_s=60)))
        while not (found := _locked()):
            assert not task.done()
            await asyncio.sleep(0.05)
        status = dict(line.split(":\t", 1) for line in _status(found[0]).splitlines())
        status["owner"] = str(_owner(found[0]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return status

    status = asyncio.run(scenario())
    may_read = 1 << 2
    assert {int(status[name], 16) & ~may_read for name in ("CapEff", "CapPrm", "CapInh")} == {0}
    assert (status["NoNewPrivs"], status["owner"]) == ("1", "0"), "what dumps no core belongs to root in /proc"


@pytest.mark.parametrize(
    "program",
    [
        "import time; time.sleep(1000)",
        "while True: pass",
        "import signal\nfor n in (15, 2, 1, 14): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); signal.pause()",
        "import os, time; os.close(1); os.close(2); time.sleep(1000)",
        "import os, time; os._exit = None; import atexit; atexit.register(time.sleep, 1000)",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\ntry: f()\nfinally:\n    while True: pass",
        "9**9**9",
    ],
)
def test_no_program_outlives_the_deadline(program: str) -> None:
    began_s = time.monotonic()
    result = _run(program, wall_s=3, cpu_s=60)
    assert time.monotonic() - began_s < 30, "a bound for a busy machine; the deadline was 3 s"
    assert result.exit_reason in ("timeout", "killed")


def test_output_before_the_deadline_is_kept() -> None:
    result = _run("print('so far')\nwhile True: pass", wall_s=5, cpu_s=60)
    assert result.text == "so far\n[timeout: not done within 5 s]"


def test_processor_time_is_bounded_even_if_the_signal_is_ignored() -> None:
    assert _run("while True: pass", cpu_s=1, wall_s=60).detail == "used more than 1 s of processor time"
    ignoring = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert _run(ignoring, cpu_s=1, wall_s=60).detail == "ended by SIGKILL"


def test_no_limit_can_be_raised() -> None:
    for attempt in ("setrlimit(resource.RLIMIT_AS, (2**40, 2**40))", "setrlimit(resource.RLIMIT_FSIZE, (10, 10))"):
        _assert_refused(f"import resource; resource.{attempt}", "ValueError: not allowed to raise maximum limit")


def test_memory_is_bounded() -> None:
    assert _run("x = bytearray(10**9)").exit_reason == "memory"
    assert _run("x = []\nwhile True: x.append(bytearray(10**6))", memory_bytes=256 << 20).exit_reason == "memory"
    caught = "try: bytearray(10**9)\nexcept MemoryError: print('caught')"
    assert (_run(caught).exit_reason, _run(caught).stdout) == ("ok", "caught\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_program_with_endless_output_is_killed(stream: str) -> None:
    result = _run(f"import sys\nwhile True: sys.{stream}.write('é' * 1000)", max_output_bytes=1001, wall_s=60, cpu_s=60)
    assert (result.exit_reason, result.detail) == ("killed", "printed more than 1001 bytes")
    assert getattr(result, stream) == "é" * 500 + "\ufffd\n[cut after 1001 bytes]"


def test_output_of_exactly_the_limit_is_complete() -> None:
    result = _run("print('x' * 999)", max_output_bytes=1000)
    assert (result.stdout, result.exit_reason) == ("x" * 999 + "\n", "ok")


@pytest.mark.parametrize(
    "program",
    [
        "for n in range(10**9): open(f'{n}', 'w').close()",
        "for n in range(10**9): open(f'{n % 100}', 'wb').write(b'x' * 500_000)",
        "import os\nheld = []\nwhile True:\n    if len(held) < 40:\n        held.append(open('a', 'wb', 0))\n"
        "        os.unlink('a')\n        held[-1].write(b'x' * 500_000)",
        "import os\nfor n in '12345678': open(n, 'wb').write(b'x' * 500_000)\nwhile 1: open('a', 'w'); os.unlink('a')",
        "import ctypes, os\nfor n in range(40):\n    with open('a', 'w+b', 0) as f:\n        f.write(b'x' * 500_000)\n"
        "        ctypes.CDLL(None).mmap(0, 4096, 1, 1, f.fileno(), 0)\n    os.unlink('a')\nwhile True: pass",
    ],
)
def test_number_and_total_size_of_files_are_bounded(program: str) -> None:
    result = _run(program, max_file_bytes=1 << 20, wall_s=60, cpu_s=60)
    assert (result.exit_reason, result.detail) == ("killed", "more than 256 files, or 1048576 bytes in them")


def test_each_file_and_the_number_of_open_files_are_bounded() -> None:
    program = "import os\nf = open('a', 'wb')\nos.unlink('a')\nf.write(b'x' * 2_000_000)\nf.flush()"
    result = _run(program, max_file_bytes=1 << 20)
    assert (result.exit_reason, "File too large" in result.stderr) == ("error", True)
    assert "Too many open files" in _run("held = [open('a', 'w') for _ in range(100)]").stderr


def test_threads_are_refused_or_limited() -> None:
    start = "import threading, time\nfor _ in range({}): threading.Thread(target=time.sleep, args=(3,)).start()\n"
    assert "can't start new thread" in _run(start.format(1)).stderr
    allowed = _run(start.format(2) + "print('done')", max_threads=2)
    assert (allowed.stdout, allowed.exit_reason) == ("done\n", "ok"), allowed.text
    assert _run(start.format(20), max_threads=2).detail == "more than 2 threads"
    assert "Operation not permitted" in _run("import os; os.fork()", max_threads=2).stderr


def test_a_crash_dumps_no_core() -> None:
    result = _run("import resource; print(resource.getrlimit(resource.RLIMIT_CORE)); import os; os.abort()")
    assert (result.stdout, result.exit_reason) == ("(0, 0)\n", "killed")


def test_concurrent_programs_do_not_see_each_other() -> None:
    async def scenario() -> list[SandboxResult]:
        program = "open('mine', 'x').write('{0}'); print({0}, open('mine').read())"
        limits = SandboxLimits(wall_s=60)
        return list(await asyncio.gather(*(run_python(program.format(n), limits) for n in range(24))))

    assert [result.text for result in asyncio.run(scenario())] == [f"{n} {n}" for n in range(24)]


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.5])
def test_cancelling_the_caller_kills_the_program(after_s: float, folders: Path) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(run_python("import time; time.sleep(1000)", SandboxLimits(wall_s=1000)))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        _assert_nothing_is_left(folders)

    asyncio.run(scenario())


def test_a_program_dies_with_its_parent(folders: Path) -> None:
    code = (
        "import asyncio\nfrom areal_rloo.tasks.tools.sandbox import *\n"
        "asyncio.run(run_python('import time; time.sleep(1000)', SandboxLimits(wall_s=1000)))"
    )
    environment = {**os.environ, "TMPDIR": str(folders), "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    deadline_s = time.monotonic() + 60
    while not (found := _locked()):
        assert parent.poll() is None and time.monotonic() < deadline_s, "it never started"
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    gone, alive = psutil.wait_procs(found, timeout=120)
    assert (len(gone), alive) == (1, [])
    for left in folders.iterdir():  # the dead parent could not remove the folder
        subprocess.run(["rm", "-r", left], check=True)
