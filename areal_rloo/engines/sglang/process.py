"""The process of a managed server: find a Python with SGLang, build the command line, start and kill the process.

The server runs in a separate session, so a signal to the session also ends the scheduler and the detokenizer, even if
these are stopped. If this process is killed, Linux kills the server, and SGLang kills the children.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from areal_rloo.config import SGLangConfig, argument_name
from areal_rloo.engines.sglang.client import TESTED_VERSION
from areal_rloo.errors import ConfigError
from areal_rloo.files import ScratchFolder, open_private
from areal_rloo.parent_death import bound_to_this_process
from areal_rloo.ports import ReservedPorts
from areal_rloo.session_leader import SessionLeader
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_BESIDE = Path(".venv-sglang/bin/python")
_VERSION_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 30.0
_TAIL_BYTES = 64 * 1024
_START_BYTES = 16 * 2**20  # of a log: far more than a server writes before it is ready
_ENTRY = re.compile(r"^(?=\[\d{4}-\d\d-\d\d )", re.MULTILINE)  # a log line and the traceback
_ERROR = re.compile(r"Error|ERROR|error:")
_CORES = "SGLANG_CPU_OMP_THREADS_BIND"  # CPU cores of each rank
_CPU: dict[str, str | float | bool | None] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "sleep-on-idle": True,  # without this, an idle server keeps a core busy
    "mem-fraction-static": 0.3,
}


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The settings of a managed server.

    Attributes:
        model_path: folder of the weights of version 0.
        device: cpu or cuda.
        dtype: float32 or bfloat16.
        tensor_parallel: number of the server's devices.
        num_slots: completions under way at a time.
        context_tokens: longest prompt and completion together.
        num_threads: CPU threads; 0 for torch's default.
        model_context_tokens: the model's longest context; None if the config does not tell.
        radix_cache: False if the server cannot separate the cached prompts of two versions.
    """

    model_path: Path
    device: str
    dtype: str
    tensor_parallel: int
    num_slots: int
    context_tokens: int
    num_threads: int
    model_context_tokens: int | None = None
    radix_cache: bool = True


class ServerProcess:
    """A run of a server; `log` is appended to."""

    def __init__(self, python: str, config: SGLangConfig, plan: ServerPlan, log: Path) -> None:
        """Start the server. The calling thread must live as long as the server."""
        self._reserved = ReservedPorts(1)
        (self.port,) = self._reserved.ports
        self.url = f"http://127.0.0.1:{self.port}"
        self.api_key = secrets.token_hex(16)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        self._secrets = ScratchFolder(Path(tempfile.gettempdir()), "sglang")
        secrets_file = self._secrets.path / "secrets.yaml"
        command = [python, "-m", "sglang.launch_server", "--config", str(secrets_file)]
        command += command_line(config.arguments, plan, port=self.port)
        try:
            with open_private(secrets_file, "wb") as file:
                file.write(f"api-key: {self.api_key}\n".encode())
            with open_private(log, "ab") as output:  # SGLang logs all options, with the api key (`forget_secrets`)
                process = subprocess.Popen(
                    bound_to_this_process(command, signal.SIGKILL),
                    env={**os.environ, **environment(plan)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            self._clear()
            raise
        self._leader = SessionLeader(process)
        self.pid = process.pid

    def exit_code(self) -> int | None:
        """Return the exit code; None while the server runs."""
        return self._leader.exit_code()

    def forget_secrets(self) -> None:
        """Remove the file with the api key, which the server has read, and the key from the log of the start."""
        self._secrets.close()
        with contextlib.suppress(OSError), self.log.open("r+b") as file:
            file.seek(self._log_start)
            for found in re.finditer(self.api_key.encode(), file.read(_START_BYTES)):
                file.seek(self._log_start + found.start())
                file.write(b"*" * len(self.api_key))  # the length stays: the server appends meanwhile

    def kill(self) -> None:
        """Kill the session, and reap the server."""
        self._clear()
        if not self._leader.kill(_KILL_TIMEOUT_S):  # a hung system call, for example of a GPU driver
            logger.error("the server (pid %d) was killed and does not end; its device may stay in use", self.pid)

    def last_words(self) -> str:
        """Return the last error in this run's log, or the last line if there is no error."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        # SGLang logs this harmless error at every start, before it listens.
        entries = [entry for entry in _ENTRY.split(text) if "freeze_gc failed" not in entry]
        spoken = [line.strip() for entry in entries for line in entry.splitlines() if line.strip()]
        errors = [line for line in spoken if _ERROR.search(line)]
        return (errors or spoken or ["nothing"])[-1][:500]

    def _clear(self) -> None:
        self.forget_secrets()
        self._reserved.close()


def find_python(config: SGLangConfig) -> str:
    """Return the Python that runs the server.

    Raises:
        ConfigError: there is no such Python, or none with sglang.
    """
    # The distribution, not the module: any folder named sglang on the path can be imported as a namespace package.
    if config.python is None and any(distributions(name="sglang")):
        return sys.executable
    python = config.python or str(_BESIDE.absolute())
    remedy = (
        f"run make sglang, or pip install 'sglang>={TESTED_VERSION}' in an environment of its own and name its "
        "bin/python there"
    )
    if not os.access(python, os.X_OK):
        words = f"rollout.sglang.python: expected a Python that has sglang, found none at {python}; {remedy}"
        raise ConfigError(words, absent=True)
    ask = "from importlib.metadata import version; version('sglang')"
    try:
        asked = subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"rollout.sglang.python: {python} cannot be run: {error}; {remedy}") from error
    if asked.returncode != 0:
        raise ConfigError(f"rollout.sglang.python: {python} has no sglang; {remedy}", absent=True)
    return python


def command_line(arguments: Mapping[str, str | float | bool | None], plan: ServerPlan, *, port: int) -> list[str]:
    """Return the server's options: our defaults, then the user's arguments, then fixed options."""
    chosen: dict[str, str | float | bool | None] = {
        "dtype": plan.dtype,
        "max-running-requests": plan.num_slots,
        "enable-metrics": True,
        "skip-server-warmup": True,
        "disable-radix-cache": not plan.radix_cache,
    }
    # A little more than needed: SGLang reserves a few tokens of the context.
    context_tokens = plan.context_tokens + 16
    if plan.model_context_tokens is None or context_tokens < plan.model_context_tokens:
        chosen["context-length"] = context_tokens
    if plan.device == "cpu":
        chosen |= _CPU
        chosen["max-total-tokens"] = plan.num_slots * context_tokens
    chosen |= {argument_name(name): value for name, value in arguments.items()}
    chosen |= {
        "model-path": str(plan.model_path),
        "device": plan.device,
        "tp-size": plan.tensor_parallel,
        "host": "127.0.0.1",
        "port": port,
        "weight-version": "0",
    }
    words: list[str] = []
    for name, value in chosen.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}", str(value)]
    return words


def environment(plan: ServerPlan) -> dict[str, str]:
    if plan.device != "cpu":
        return {}
    changes = {"CUDA_VISIBLE_DEVICES": ""}
    if plan.num_threads:
        changes["OMP_NUM_THREADS"] = str(plan.num_threads)
    if plan.tensor_parallel > 1 and _CORES not in os.environ:  # SGLang does not start without this
        cores = sorted(os.sched_getaffinity(0))
        changes[_CORES] = "|".join(str(cores[rank % len(cores)]) for rank in range(plan.tensor_parallel))
    return changes
