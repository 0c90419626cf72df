"""Run the programs of a model in sandboxes, and try again if a sandbox fails.

    code ─► a free core ─► run_python ─► the text for the model
                              │ the sandbox failed (killed for memory, slow file system): a pause, and another try
                              ▼
                          EpisodeError: drops this sample;  StartError: ends the worker, after minutes of failures

Use on one event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass

from areal_rloo.errors import EpisodeError, PreflightError, StartError
from areal_rloo.tasks.tools.sandbox import SandboxLimits, run_python
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often a program is tried, and when all programs are given up."""

    pauses_s: tuple[float, ...] = (1.0, 4.0, 10.0)  # between tries of the same program
    most_failures: int = 10  # programs in a row, and
    give_up_after_s: float = 180.0  # since the first of them


class Programs:
    """Runs programs, at most as many as cores: the time limit of a program does not depend on the load."""

    def __init__(self, limits: SandboxLimits, retries: Retries | None = None) -> None:
        self._limits, self._retries = limits, retries or Retries()
        self._cores = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        self._has_run = False
        self._num_failures, self._failing_since_s = 0, 0.0

    async def run(self, code: str) -> str:
        """Run a program; return the text for the model.

        Raises:
            EpisodeError: the sandbox failed, again and again.
            PreflightError: this machine cannot lock programs, and never could.
            StartError: the sandbox failed for several programs in a row, for minutes.
        """
        for pause_s in (*self._retries.pauses_s, None):
            try:
                async with self._cores:
                    result = await run_python(code, self._limits)
            except (EpisodeError, PreflightError) as error:
                if isinstance(error, PreflightError) and not self._has_run:
                    raise
                failure = error
            else:
                self._has_run, self._num_failures = True, 0
                return result.text
            logger.warning("a program was not run: %s", failure)
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        self._count_failure(failure)
        raise failure if isinstance(failure, EpisodeError) else EpisodeError("tool_failed", str(failure))

    def _count_failure(self, failure: Exception) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            self._failing_since_s = time.monotonic()
        failing_s = time.monotonic() - self._failing_since_s
        if self._num_failures >= self._retries.most_failures and failing_s >= self._retries.give_up_after_s:
            raise StartError(f"{self._num_failures} programs in a row were not run, for {failing_s:.0f} s: {failure}")
