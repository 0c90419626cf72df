"""The rollout workers of a run, and their number, which may change while the run goes on.

    scale.py ─► scale.json in the run folder ─► Fleet: starts more workers, or drains the last ones ─► the answer

A drained worker gives its samples back and says Goodbye to the learner. The learner takes joining and leaving workers
as after a crash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec

from areal_rloo.config import MOST_WORKERS, Config
from areal_rloo.decoding import from_json
from areal_rloo.errors import DecodeError, PreflightError, UserError
from areal_rloo.files import read_regular, write_atomically
from areal_rloo.launcher.hosts import ClaimedGpus
from areal_rloo.launcher.placement import Host, Placement, resized
from areal_rloo.launcher.plan import Plan
from areal_rloo.launcher.supervisor import Supervisor
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.progress import Progress
from areal_rloo.telemetry.targets import Targets
from areal_rloo.telemetry.wanted import LauncherStatistics, note_wanted

logger = get_logger(__name__)

_WISH, _ANSWER = "scale.json", "scale-answer.json"
_CLAIM_TIMEOUT_S = 5.0
_START_EVERY_S = 5.0  # after a failed start


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """scale.json: the wanted number of workers."""

    wish_id: str
    num_workers: int


class Answer(msgspec.Struct, frozen=True):
    """scale-answer.json: the launcher has begun to fulfil the wish, or refuses."""

    wish_id: str
    refusal: str | None = None


class Room(Protocol):
    """The places for workers of a running run."""

    def resized(self, placement: Placement, num_workers: int) -> Placement:
        """Give the placement with this number of workers.

        Raises:
            PreflightError: there is no room.
        """

    def release(self, placement: Placement) -> None:
        """Release the resources without a seat in this placement."""


class LocalRoom:
    """The free GPUs of this machine."""

    def __init__(self, here: Host, gpus: ClaimedGpus) -> None:
        self._here = here
        self._gpus = gpus

    def resized(self, placement: Placement, num_workers: int) -> Placement:
        with_free = dataclasses.replace(placement, hosts=(self._gpus.claim(self._here, timeout_s=_CLAIM_TIMEOUT_S),))
        try:
            placement = resized(with_free, num_workers)
        finally:
            self.release(placement)
        return placement

    def release(self, placement: Placement) -> None:
        self._gpus.keep(gpu_id for seat in placement.seats for gpu_id in seat.gpu_ids)


class AllocatedRoom:
    """The hosts of a placement, which belong to the run until the end: the nodes of a Slurm job."""

    def resized(self, placement: Placement, num_workers: int) -> Placement:
        return resized(placement, num_workers)

    def release(self, placement: Placement) -> None:
        pass


class ReservedRoom:
    """The seats that the run got at the start: the bundles of a Ray placement group."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def resized(self, placement: Placement, num_workers: int) -> Placement:
        most = len(self._placement.workers)
        if num_workers > most:
            raise PreflightError(
                f"num_workers: Ray has reserved places for {most} workers at the start, got {num_workers}; use "
                f"areal-rloo resume RUN_FOLDER rollout.num_workers={num_workers} after its end"
            )
        return dataclasses.replace(self._placement, workers=self._placement.workers[:num_workers])

    def release(self, placement: Placement) -> None:
        pass


def check_number(num_workers: int, config: Config) -> None:
    """
    Raises:
        PreflightError: no run of this config can have this number of workers.
    """
    num_urls = len(config.rollout.server_urls)
    if not 1 <= num_workers <= (num_urls or MOST_WORKERS):
        why = f", the number of rollout.{config.rollout.engine}.urls" * bool(num_urls)
        expected = f"1 to {num_urls or MOST_WORKERS}{why}"
        raise PreflightError(f"num_workers: expected {expected}, got {num_workers}; drain the run to end all workers")


def ask(folder: Path, wish: Wish) -> None:
    """Leave a wish for the launcher of a run."""
    write_atomically(folder / _WISH, msgspec.json.encode(wish))


def is_asked(folder: Path) -> bool:
    """Whether a wish is there; a launcher that starts removes the wishes of an earlier start, and perhaps a new one."""
    return (folder / _WISH).exists()


def read_answer(folder: Path, wish: Wish) -> Answer | None:
    """Read the launcher's answer to a wish; None if there is none yet."""
    try:
        answer = from_json(read_regular(folder / _ANSWER), Answer)
    except (OSError, DecodeError):
        return None
    return answer if answer.wish_id == wish.wish_id else None


class Fleet:
    """The workers of a run. Used on the launcher's main thread."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        *,
        folder: Path,
        room: Room,
        plan: Callable[[Placement], Plan],
        supervisor: Supervisor,
        progress: Progress,
    ) -> None:
        # Of a run on a single host, neither the wire nor the weights leave the host.
        hosts = placement.hosts if len(placement.used_hosts) > 1 else placement.used_hosts
        self._config, self._folder = config, folder
        self._placement = dataclasses.replace(placement, hosts=hosts)
        self._room, self._plan, self._supervisor, self._progress = room, plan, supervisor, progress
        self._specs = {spec.name: spec for spec in plan(placement).workers}
        self._started: list[str] = []
        self._first = frozenset(self._specs)  # workers of the start of the run
        self._leaving_until_s: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        self._began_s = datetime.now(UTC).timestamp()
        self._seen: bytes | None = None
        self._start_at_s = 0.0
        (folder / _WISH).unlink(missing_ok=True)  # of an earlier start
        self._note_wanted()

    @property
    def names(self) -> list[str]:
        """The workers started and not to be ended."""
        return list(self._started)

    def start(self) -> None:
        """Start all missing workers.

        Raises:
            OSError: a worker cannot be started now.
        """
        for name, spec in self._specs.items():
            if name not in self._started:
                self._supervisor.start(spec)
                self._started.append(name)

    def tend(self) -> int | None:
        """Restart dead workers; give an exit code if the run must end because no worker is left."""
        alive = 0
        for name in self._started:
            if name in self._first and self._supervisor.is_refused(name):  # of a later worker, 2 is a crash
                self._progress.warn(self._supervisor.last_words(name))
                return 2
            alive += self._supervisor.tend(name)
        if (restarts := self._supervisor.restarts()) != self._restarts:
            self._restarts = restarts
            self._note_wanted()
        if alive == 0:
            self._progress.warn(
                "every rollout worker died too often (launcher.max_restarts): the run ends, with a checkpoint if the "
                "training has begun"
            )
            return 1
        return None

    def resize(self) -> None:
        """Fulfil a wish, if there is any, and finish the last one."""
        self._end_leaving()
        if self._leaving_until_s:
            return  # the seats are still taken
        try:
            self._obey_wish()
            if time.monotonic() >= self._start_at_s:
                self.start()
        except OSError as error:
            if self._start_at_s == 0.0:
                self._progress.warn(f"workers cannot be added now: {error}; the launcher goes on trying")
            self._start_at_s = time.monotonic() + _START_EVERY_S
            return
        if len(self._started) == len(self._specs):
            self._start_at_s = 0.0

    def _obey_wish(self) -> None:
        try:
            encoded = read_regular(self._folder / _WISH)
        except OSError:  # no wish; or a disk that may read the wish later
            return
        if encoded == self._seen:
            return
        try:
            wish = from_json(encoded, Wish)
        except DecodeError as error:
            self._progress.warn(f"{self._folder / _WISH} is ignored: {error}; use python -m areal_rloo.launcher.scale")
            self._seen = encoded
            return
        answer = Answer(wish.wish_id)
        try:
            self._resize_to(wish.num_workers)
        except UserError as error:
            self._progress.warn(f"the number of workers stays {len(self._specs)}: {error}")
            answer = Answer(wish.wish_id, str(error))
        write_atomically(self._folder / _ANSWER, msgspec.json.encode(answer))
        self._seen = encoded  # after a failure so far, the same wish is fulfilled again

    def _resize_to(self, num_workers: int) -> None:
        check_number(num_workers, self._config)
        self._placement = (
            self._room.resized(self._placement, num_workers)
            if num_workers > len(self._specs)
            else (dataclasses.replace(self._placement, workers=self._placement.workers[:num_workers]))
        )
        if num_workers != len(self._specs):
            self._progress.say(f"rollout workers: {len(self._specs)} before, {num_workers} from now on")
        self._specs = {spec.name: spec for spec in self._plan(self._placement).workers}
        self._note_wanted()
        ends_s = time.monotonic() + self._config.launcher.drain_timeout_s
        for name in [name for name in self._started if name not in self._specs]:
            self._supervisor.signal(name, signal.SIGTERM)
            self._started.remove(name)
            self._leaving_until_s[name] = ends_s
        self._first &= self._specs.keys()

    def _note_wanted(self) -> None:
        self._progress.num_wanted = len(self._specs)
        with contextlib.suppress(OSError):  # only an alarm needs it
            noted = LauncherStatistics(
                num_workers=len(self._specs), restarts=self._restarts, start_timestamp_s=self._began_s
            )
            note_wanted(self._folder, noted)

    def _end_leaving(self) -> None:
        for name, ends_s in list(self._leaving_until_s.items()):
            if self._supervisor.exit_code(name) is None and time.monotonic() > ends_s:
                logger.warning("killing %s, which did not drain in time", name)
                self._supervisor.kill(name)
            if self._supervisor.exit_code(name) is not None:
                self._supervisor.forget(name)
                Targets(self._config, self._folder).remove(name)  # a killed worker has left its file
                del self._leaving_until_s[name]
                self._room.release(self._placement)
