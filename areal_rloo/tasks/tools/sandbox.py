"""Run Python of a language model in a process that can only compute and print.

    code ─► scratch folder ─► a child process that locks itself ─► the output, and how the program ended
                              (sandbox_child.py; landlock.py: files, seccomp.py: system calls)

The child reads Python, packages and the scratch folder, and writes only the scratch folder. The child has no network,
no other process, no signals, and no environment variables of ours. `run_python` waits without blocking the event loop.
It kills the child at the deadline, at too much output, files or threads, and on cancellation, and then removes the
scratch folder. The next start of a process removes the folders of a killed worker.

Not covered: existence and size of files outside (`stat` has no lock), the load of the machine, and bugs of the kernel.
Code of an adversary, rather than of a model in training, needs a virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import math
import os
import platform
import resource
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from areal_rloo.errors import EpisodeError, PreflightError
from areal_rloo.files import ScratchFolder
from areal_rloo.tasks.tools import landlock, sandbox_child
from areal_rloo.tasks.tools.seccomp import seccomp_filter

if TYPE_CHECKING:
    from areal_rloo.tasks.tools.sandbox_child import Orders

_PROGRAM = "program.py"
_WATCH_S = 0.1  # between two checks of limits that the kernel does not enforce
_MOST_FILES = 256
_MOST_OPEN_FILES = 64
_START_S = 60.0  # limit of the trial before a run; the machine may be busy
_END_S = 20.0  # for the end of a killed program; a system call may delay the end
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",  # the same program always prints the same output
    # By default, numerical libraries start threads on import.
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"),
}

ExitReason = Literal["ok", "error", "timeout", "memory", "killed"]


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a program. A program can never start processes."""

    cpu_s: float = 5.0  # of processor time, rounded up to whole seconds
    wall_s: float = 10.0  # includes the start of the interpreter
    memory_bytes: int = 512 << 20  # of address space, including interpreter and libraries
    max_threads: int = 0  # besides the first
    max_file_bytes: int = 16 << 20  # of all files together, and of each file
    max_output_bytes: int = 64 << 10  # of stdout, and of stderr; a program with more output is killed


class SandboxResult(msgspec.Struct, frozen=True, kw_only=True):
    """The output of a program, and how the program ended.

    Exit reasons: `ok` (status 0), `error` (another status, or an exception), `timeout`, `memory` (an uncaught
    MemoryError) or `killed` (by a limit or a signal).
    """

    stdout: str
    stderr: str
    exit_reason: ExitReason
    detail: str = ""  # the exceeded limit, in words

    @property
    def text(self) -> str:
        """The text for the model: all output, and a last line after a failure."""
        parts = [self.stdout.rstrip(), self.stderr.rstrip()]
        if self.detail:
            parts.append(f"[{self.exit_reason}: {self.detail}]")
        return "\n".join(filter(None, parts)) or "[nothing was printed]"


def check_sandbox(private: Sequence[Path] = ()) -> None:
    """Check, by a trial, that this machine can lock programs. Called before a run starts.

    Args:
        private: folders that no program may read, such as the run folder.

    Raises:
        PreflightError: the kernel cannot lock programs, or programs could read a private folder.
    """
    for folder in private:
        for path in landlock.readable():
            if folder.resolve().is_relative_to(path.resolve()):
                raise PreflightError(
                    f"the sandbox lets programs read {path}, which contains {folder}; choose another folder"
                )
    try:
        result = asyncio.run(run_python("print('locked')", SandboxLimits(wall_s=_START_S)))
    except EpisodeError as error:
        raise PreflightError(f"a trial of {error.detail}") from error
    if result.text != "locked":
        raise PreflightError(f"a trial of the sandbox failed: {result.text}")


async def run_python(code: str, limits: SandboxLimits, stdin: bytes | socket.socket = b"") -> SandboxResult:
    """Run a program and wait for the end. Any number of programs may run concurrently.

    More programs than cores can cause timeouts, because `limits.wall_s` does not depend on the load. The program reads
    `stdin`; a socket is closed here, and the program can also write to the socket.

    Raises:
        PreflightError: the kernel cannot lock the program; the program did not run.
        EpisodeError: the process was killed before it had locked itself in, could not be started, or could not be
            ended; not the fault of the program.
    """
    with contextlib.ExitStack() as ends:
        if isinstance(stdin, socket.socket):
            ends.callback(stdin.close)  # also if the program does not start
        try:
            folder = ScratchFolder(Path(tempfile.gettempdir()), "sandbox")
            ends.callback(folder.close)
            scratch = folder.path / "scratch"  # writable; the orders and the input stay outside
            with _opened(stdin, folder.path / "stdin") as source:
                process = await asyncio.create_subprocess_exec(
                    *_command(scratch, code, limits),
                    cwd=scratch,
                    env={**_ENVIRONMENT, "HOME": str(scratch), "TMPDIR": str(scratch)},
                    stdin=source,
                    stdout=PIPE,
                    stderr=PIPE,
                    start_new_session=True,  # without a terminal, outside the process group of Ctrl-C
                )
        except OSError as error:  # too little memory, too many processes, a full disk
            raise EpisodeError("tool_failed", f"the sandbox cannot start a process: {error}") from error
        run = _Run(process, scratch, limits)
        try:
            async with asyncio.timeout(limits.wall_s + _END_S):
                return await run.result()
        except TimeoutError:
            detail = f"the sandbox could not end a program within {_END_S:g} s after its deadline"
            raise EpisodeError("tool_timeout", detail) from None
        finally:
            run.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await process.communicate()  # returns, because no child of the program can hold the pipes


@contextlib.contextmanager
def _opened(stdin: bytes | socket.socket, path: Path) -> Iterator[int]:
    """Give the descriptor of a program's input, for the start: of the socket, or of a file that can only be read."""
    if isinstance(stdin, socket.socket):
        with stdin:
            yield stdin.fileno()
    else:
        path.write_bytes(stdin)
        with path.open("rb") as file:
            yield file.fileno()


class _Run:
    """The parent's view of a running program."""

    def __init__(self, process: Process, scratch: Path, limits: SandboxLimits) -> None:
        self._process, self._scratch, self._limits = process, scratch, limits
        self._stopped: tuple[ExitReason, str] | None = None

    async def result(self) -> SandboxResult:
        assert self._process.stdout is not None and self._process.stderr is not None, "both are pipes"
        watch = asyncio.create_task(self._watch(), name="limits of a program")
        try:
            out, err = await asyncio.gather(
                self._read(self._process.stdout, len(sandbox_child.LOCKED)), self._read(self._process.stderr)
            )
            await self._process.wait()  # a program may close both pipes and continue
        finally:
            watch.cancel()
        if not out.startswith(sandbox_child.LOCKED):
            raise _not_locked(self._process.returncode, err)
        reason, detail = self._stopped or self._end()
        stdout = self._text(out.removeprefix(sandbox_child.LOCKED))
        return SandboxResult(stdout=stdout, stderr=self._text(err), exit_reason=reason, detail=detail)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    def _stop(self, reason: ExitReason, detail: str) -> None:
        """Kill the program and keep the first reason."""
        self._stopped = self._stopped or (reason, detail)
        self.kill()

    async def _watch(self) -> None:
        ends_s = time.monotonic() + self._limits.wall_s
        while (left_s := ends_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, _WATCH_S))
            if excess := self._excess():
                self._stop("killed", excess)
        self._stop("timeout", f"not done within {self._limits.wall_s:g} s")

    def _excess(self) -> str:
        """Return a description of an exceeded limit, or "".

        All files are in a flat folder (see landlock.py), or removed and still open or mapped.
        """
        process = Path(f"/proc/{self._process.pid}")
        try:
            num_threads = sum(1 for _ in (process / "task").iterdir()) - 1
            files = [*_stats(self._scratch, follow=False)]
        except OSError:
            return ""  # the program ended during this check
        removed: dict[int, os.stat_result] = {}
        for folder in ("fd", "map_files"):
            with contextlib.suppress(OSError):  # only root can look: the program is locked against other processes
                removed |= {one.st_ino: one for one in _stats(process / folder, follow=True) if one.st_nlink == 0}
        files += removed.values()
        sizes = [one.st_blocks * 512 for one in files]
        if num_threads > self._limits.max_threads:
            return f"more than {self._limits.max_threads} threads"
        if len(sizes) > _MOST_FILES or sum(sizes) > self._limits.max_file_bytes + len(sizes) * 4096:
            return f"more than {_MOST_FILES} files, or {self._limits.max_file_bytes} bytes in them"
        return ""

    async def _read(self, stream: asyncio.StreamReader, extra_bytes: int = 0) -> bytes:
        """Read until the end of the stream; keep a byte beyond the limit to mark truncated output."""
        most_bytes = self._limits.max_output_bytes + extra_bytes
        kept = bytearray()
        while chunk := await stream.read(1 << 16):
            kept += chunk[: most_bytes + 1 - len(kept)]
            if len(kept) > most_bytes:  # reading the rest would only block the event loop
                self._stop("killed", f"printed more than {self._limits.max_output_bytes} bytes")
        return bytes(kept)

    def _text(self, output: bytes) -> str:
        most_bytes = self._limits.max_output_bytes
        marker = f"\n[cut after {most_bytes} bytes]" if len(output) > most_bytes else ""
        return output[:most_bytes].decode(errors="replace") + marker

    def _end(self) -> tuple[ExitReason, str]:
        code = self._process.returncode
        assert code is not None, "the process has ended"
        if code == 0:
            return "ok", ""
        if code == sandbox_child.OUT_OF_MEMORY:
            return "memory", f"the limit is {self._limits.memory_bytes >> 20} MiB, Python included"
        if code == -signal.SIGXCPU:
            return "timeout", f"used more than {self._limits.cpu_s:g} s of processor time"
        return ("killed", f"ended by {signal.Signals(-code).name}") if code < 0 else ("error", f"exit status {code}")


def _stats(folder: Path, *, follow: bool) -> Iterator[os.stat_result]:
    """Give the status of each file in a folder, without files removed meanwhile."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield path.stat(follow_symlinks=follow)


def _command(scratch: Path, code: str, limits: SandboxLimits) -> list[str]:
    """Make the folder of a program, and return the command that starts the program."""
    version = landlock.landlock_version()
    scratch.mkdir()
    (scratch / _PROGRAM).write_bytes(code.encode(errors="surrogatepass"))  # Python reports invalid Unicode
    cpu_s = math.ceil(limits.cpu_s)
    orders: Orders = {
        "parent": os.getpid(),
        "program": _PROGRAM,
        "package_folders": [str(path) for path in landlock.package_folders()],
        "ruleset": landlock.ruleset(version),
        "rules": landlock.rules(version, scratch),
        "filter": seccomp_filter(platform.machine(), threads=limits.max_threads > 0),
        "limits": [
            (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),  # SIGXCPU, which a program may ignore, then SIGKILL
            (resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes),
            (resource.RLIMIT_FSIZE, limits.max_file_bytes, limits.max_file_bytes),
            (resource.RLIMIT_NOFILE, _MOST_OPEN_FILES, _MOST_OPEN_FILES),
            (resource.RLIMIT_CORE, 0, 0),
        ],
    }
    path = scratch.with_name("orders")
    path.write_bytes(marshal.dumps(dict(orders)))
    # Safe path, no user site, no site, no bytecode: only imports of the program itself.
    flags = ["-P", "-s", "-S", "-B", "-X", "utf8"]
    return [sys.executable, *flags, sandbox_child.__file__, str(path)]


def _not_locked(code: int | None, stderr: bytes) -> PreflightError | EpisodeError:
    said = stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"the process ended with code {code}"
    detail = f"the sandbox could not lock the program, so nothing was run: {said}"
    return PreflightError(detail) if code == sandbox_child.NOT_LOCKED else EpisodeError("tool_failed", detail)
