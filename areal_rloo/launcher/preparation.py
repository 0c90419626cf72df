"""The tiny model of a run, made by a process that ends before all others start. Runs on the launcher's main thread.

A warm start that a signal ends starts anew, like a learner. Without a signal, the same error would come again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from areal_rloo.decoding import from_json
from areal_rloo.errors import DecodeError, PreflightError
from areal_rloo.files import read_regular
from areal_rloo.launcher.long_logs import last_line
from areal_rloo.launcher.plan import JobRequest, ProcessSpec, plan_run
from areal_rloo.launcher.supervisor import KILLED, Supervisor, backoff_s, first_start, named
from areal_rloo.learner.warm_start import PreparedModel, tiny_model_folder
from areal_rloo.telemetry.progress import Progress
from areal_rloo.waiting import wait_until

_LOOK_EVERY_S = 0.1
_SAY_EVERY_S = 30.0
_FIRST_SIGNAL = 128 + 1


class Preparation:
    """Makes the tiny model if the run needs one. `stops` returns True once a signal asks for the end of the run."""

    def __init__(
        self, request: JobRequest, supervisor: Supervisor, progress: Progress, stops: Callable[[], bool]
    ) -> None:
        self._request, self._supervisor, self._progress, self._stops = request, supervisor, progress, stops

    def run(self, *, goes_on: bool) -> tuple[str, float] | int:
        """Give the model's path and the seconds of the warm start. `goes_on`: from a checkpoint.

        Give the exit code of the run if the run ends here: 0 after a signal, else the code of a warm start that died.
        """
        config, plan = self._request.config, plan_run(self._request, model_path="")
        if plan.preparation is None:
            return config.model.path, 0.0
        if goes_on and (made := self._made()) is not None:  # else the recipe may be another
            return made
        if not tiny_model_folder(config, self._request.models).is_dir():
            self._progress.say("preparing the tiny model (once; it takes one to four minutes)")
        if not config.warm_starts:
            self._progress.say("the tiny model keeps random weights: it can be shown sums alone; expect rewards of 0")
        code = self._code(plan.preparation, plan.max_learner_restarts)
        if code is None or (code != 0 and self._stops()):
            return 0
        if code != 0:
            log = self._log(plan.preparation)
            if code == 2:
                words = self._supervisor.last_words(plan.preparation.name).removeprefix("error: ")
                raise PreflightError(words or f"the warm start ended with code 2; log: {log}")
            self._progress.warn(f"log: {log}; the same command starts again")
            return code
        if (made := self._made()) is None:
            raise PreflightError(
                f"the warm start left no model that {self._request.folder / 'model.json'} names; "
                "do all hosts see the folder?"
            )
        return made

    def _code(self, spec: ProcessSpec, max_restarts: int) -> int | None:
        """Run the warm start, and restart it if a signal ended it; give the last exit code, or None if the run ends."""
        for num_restarts in range(max_restarts + 1):
            with first_start():
                self._supervisor.start(spec)
            code = self._ended(spec)
            if code in (None, 0, 2) or self._stops():
                break
            words = self._supervisor.last_words(spec.name)
            if code == KILLED:
                words = words or "Was there too little memory?"
            wait_s, is_last = backoff_s(num_restarts), num_restarts == max_restarts or code < _FIRST_SIGNAL
            then = "" if is_last else f"; restart {num_restarts + 1} of {max_restarts} in {wait_s:.1f} s"
            self._progress.warn(f"the warm start ended with code {named(code)}{then}. {words}".rstrip())
            if is_last or wait_until(self._stops, timeout_s=wait_s, look_every_s=_LOOK_EVERY_S):
                break
        return code

    def _ended(self, spec: ProcessSpec) -> int | None:
        """Wait for the exit code of the warm start, or for a signal: None then."""
        began_s = said_s = time.monotonic()
        while (code := self._supervisor.exit_code(spec.name)) is None and not self._stops():
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s = time.monotonic()
                reached = last_line(self._log(spec).with_suffix(".log")).rpartition("warm start: ")[2]
                self._progress.say(f"still preparing the tiny model, for {said_s - began_s:.0f} s; {reached}")
            time.sleep(_LOOK_EVERY_S)
        return code

    def _log(self, spec: ProcessSpec) -> Path:
        return self._request.folder / "logs" / f"{spec.name}.out"

    def _made(self) -> tuple[str, float] | None:
        """Read the result of a preparation, if any: the model's path and the seconds of the warm start."""
        file = self._request.folder / "model.json"
        if not file.exists():
            return None
        try:
            made = from_json(read_regular(file), PreparedModel)
        except (OSError, DecodeError):
            return None
        return (made.path, made.warm_start_s) if Path(made.path).is_dir() else None
