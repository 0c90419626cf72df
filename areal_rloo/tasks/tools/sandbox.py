"""Python that a language model wrote, in a process that can do nothing but compute and print.

    code ─► scratch folder ─► a child that locks itself in ─► what it printed, and how it ended
                              (sandbox_child.py; landlock.py: files, seccomp.py: system calls)

The child reads Python, its packages and its scratch folder, writes its scratch folder, and has no network, no other
process, no signal and no variable of ours. `run_python` waits for it without blocking the event loop, and ends it at
its deadline, at too much output, files or threads, and when its caller is cancelled; the scratch folder goes with it.

Not covered: that a file outside exists and how large it is (`stat` has no lock), how busy the machine is, and errors of
the kernel itself. Whoever runs code of an adversary rather than of a model in training wants a virtual machine.
"""

from __future__ import annotations

import asyncio
import marshal
import math
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from areal_rloo.errors import PreflightError
from areal_rloo.tasks.tools import landlock, sandbox_child
from areal_rloo.tasks.tools.orders import Orders
from areal_rloo.tasks.tools.seccomp import seccomp_filter

_PROGRAM = "program.py"
_WATCH_S = 0.1  # between two looks at what no limit of the kernel's counts
_MOST_FILES = 256
_MOST_OPEN_FILES = 64
_START_S = 60.0  # of the trial before a run, on a machine that may be busy
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",  # the same program prints the same
    # Numerical libraries start threads when they are imported, unless told not to.
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"),
}

ExitReason = Literal["ok", "error", "timeout", "memory", "killed"]


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one program may use. Processes it may not start at all."""

    cpu_s: float = 5.0  # of processor time, rounded up to whole seconds
    wall_s: float = 10.0  # from before its interpreter starts
    memory_bytes: int = 512 << 20  # of address space, the interpreter's and its libraries' included
    max_threads: int = 0  # beside the first
    max_file_bytes: int = 16 << 20  # of all its files together, and of each
    max_output_bytes: int = 64 << 10  # of stdout, and of stderr; more ends it


class SandboxResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a program printed and how it ended: `ok` (status 0), `error` (another status, an exception), `timeout`,
    `memory` (a MemoryError that it did not catch) or `killed` (by a limit or a signal)."""

    stdout: str
    stderr: str
    exit_reason: ExitReason
    detail: str = ""  # what was exceeded, in words

    @property
    def text(self) -> str:
        """For the model: all that was printed, and a last line where something went wrong."""
        parts = [self.stdout.rstrip(), self.stderr.rstrip()]
        if self.detail:
            parts.append(f"[{self.exit_reason}: {self.detail}]")
        return "\n".join(filter(None, parts)) or "[nothing was printed]"


def check_sandbox(private: Sequence[Path] = ()) -> None:
    """That programs can be locked in here, by running one; before anything starts.

    Args:
        private: folders that no program may read, such as the run folder.

    Raises:
        PreflightError: the kernel cannot do it, or a private folder lies where programs may read.
    """
    for folder in private:
        for path in landlock.readable():
            if folder.resolve().is_relative_to(path.resolve()):
                raise PreflightError(
                    f"the tool 'python' lets programs read {path}, and {folder} lies in it; put it elsewhere"
                )
    with _folder() as folder_name:
        command = _command(Path(folder_name), "print('locked')", SandboxLimits(wall_s=_START_S))
        scratch = _scratch(Path(folder_name))
        try:
            done = subprocess.run(
                command, cwd=scratch, env=_environment(scratch), stdin=subprocess.DEVNULL, capture_output=True,
                timeout=_START_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise PreflightError(f"a trial of the sandbox did not end within {_START_S:g} s") from error
    if done.stdout != sandbox_child.LOCKED + b"locked\n":
        raise _not_locked(done.returncode, done.stderr)


async def run_python(code: str, limits: SandboxLimits) -> SandboxResult:
    """Run a program and wait for its end; any number at once. However many wait, only `limits.wall_s` counts, so
    whoever starts more than the machine has cores sees timeouts that are nobody's fault.

    Raises:
        PreflightError: the kernel cannot lock it in; it was not run.
    """
    with _folder() as folder_name:
        scratch = _scratch(Path(folder_name))
        process = await asyncio.create_subprocess_exec(
            *_command(Path(folder_name), code, limits),
            cwd=scratch,
            env=_environment(scratch),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,  # no terminal, and not in the group that Ctrl-C goes to
        )
        run = _Run(process, scratch, limits)
        try:
            return await run.result()
        finally:
            run.kill()
            await process.communicate()  # it has no children that could hold the pipes, so this ends


class _Run:
    """This side of one running program."""

    def __init__(self, process: Process, scratch: Path, limits: SandboxLimits) -> None:
        self._process, self._scratch, self._limits = process, scratch, limits
        self._stopped: tuple[ExitReason, str] | None = None

    async def result(self) -> SandboxResult:
        assert self._process.stdout is not None and self._process.stderr is not None, "both are pipes"
        watch = asyncio.create_task(self._watch())
        try:
            out, err = await asyncio.gather(
                self._read(self._process.stdout, len(sandbox_child.LOCKED)), self._read(self._process.stderr)
            )
            await self._process.wait()  # it may have closed both and go on
        finally:
            watch.cancel()
        if not out.startswith(sandbox_child.LOCKED) and self._stopped is None:
            raise _not_locked(self._process.returncode, err)
        reason, detail = self._stopped or self._end()
        stdout = self._text(out.removeprefix(sandbox_child.LOCKED))
        return SandboxResult(stdout=stdout, stderr=self._text(err), exit_reason=reason, detail=detail)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    def _stop(self, reason: ExitReason, detail: str) -> None:
        """End it, for the first reason there was."""
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
        """What there is too much of. Its files lie flat in one folder, because it cannot make another."""
        try:
            num_threads = sum(1 for _ in Path(f"/proc/{self._process.pid}/task").iterdir()) - 1
            sizes = [path.lstat().st_blocks * 512 for path in self._scratch.iterdir()]
        except OSError:
            return ""  # it just ended, or removed a file between the two
        if num_threads > self._limits.max_threads:
            return f"more than {self._limits.max_threads} threads"
        if len(sizes) > _MOST_FILES or sum(sizes) > self._limits.max_file_bytes + len(sizes) * 4096:
            return f"more than {_MOST_FILES} files, or {self._limits.max_file_bytes} bytes in them"
        return ""

    async def _read(self, stream: asyncio.StreamReader, extra_bytes: int = 0) -> bytes:
        """Until it is closed; one byte more than is shown says that there was more."""
        most_bytes = self._limits.max_output_bytes + extra_bytes
        kept = bytearray()
        while chunk := await stream.read(1 << 16):
            kept += chunk[: most_bytes + 1 - len(kept)]
            if len(kept) > most_bytes:  # nobody would see the rest, and reading it would hold up everybody else
                self._stop("killed", f"it printed more than {self._limits.max_output_bytes} bytes")
        return bytes(kept)

    def _text(self, output: bytes) -> str:
        most_bytes = self._limits.max_output_bytes
        marker = f"\n[cut after {most_bytes} bytes]" if len(output) > most_bytes else ""
        return output[:most_bytes].decode(errors="replace") + marker

    def _end(self) -> tuple[ExitReason, str]:
        code = self._process.returncode
        assert code is not None, "it was waited for"
        match code:
            case 0:
                return "ok", ""
            case sandbox_child.OUT_OF_MEMORY:
                return "memory", f"it may have {self._limits.memory_bytes >> 20} MiB, Python included"
            case _ if code == -signal.SIGXCPU:
                return "timeout", f"it used more than {self._limits.cpu_s:g} s of processor time"
            case _ if code < 0:
                return "killed", f"ended by {signal.Signals(-code).name}"
        return "error", f"exit status {code}"


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="areal_rloo-sandbox-", ignore_cleanup_errors=True)


def _scratch(folder: Path) -> Path:
    """What the program may write; beside it lie the orders, which it may not."""
    return folder / "scratch"


def _environment(scratch: Path) -> dict[str, str]:
    return {**_ENVIRONMENT, "HOME": str(scratch), "TMPDIR": str(scratch)}


def _command(folder: Path, code: str, limits: SandboxLimits) -> list[str]:
    """Lay out a folder for a program, and say how to start it."""
    version, scratch = landlock.landlock_version(), _scratch(folder)
    scratch.mkdir()
    (scratch / _PROGRAM).write_bytes(code.encode(errors="surrogatepass"))  # what is no Unicode is no Python: its error
    cpu_s = math.ceil(limits.cpu_s)
    orders: Orders = {
        "parent": os.getpid(),
        "program": _PROGRAM,
        "package_folders": [str(path) for path in landlock.package_folders()],
        "ruleset": landlock.ruleset(version),
        "rules": landlock.rules(version, scratch),
        "filter": seccomp_filter(platform.machine(), threads=limits.max_threads > 0),
        "limits": [
            (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),  # a signal it may ignore, then one it may not
            (resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes),
            (resource.RLIMIT_FSIZE, limits.max_file_bytes, limits.max_file_bytes),
            (resource.RLIMIT_NOFILE, _MOST_OPEN_FILES, _MOST_OPEN_FILES),
            (resource.RLIMIT_CORE, 0, 0),
        ],
    }
    path = folder / "orders"
    path.write_bytes(marshal.dumps(dict(orders)))
    # Safe path, no user site, no site, no bytecode: nothing is imported but what it names itself.
    flags = ["-P", "-s", "-S", "-B", "-X", "utf8"]
    return [sys.executable, *flags, sandbox_child.__file__, str(path)]


def _not_locked(code: int | None, stderr: bytes) -> PreflightError:
    said = stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"its process ended with code {code}"
    return PreflightError(f"the tool 'python' could not be locked in, so nothing was run: {said}")
