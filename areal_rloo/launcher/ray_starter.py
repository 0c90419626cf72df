"""Starts the processes of a plan in the places that a Ray cluster has reserved for them, each with an owner."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from areal_rloo.config import Config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.job import JobRequest
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.launcher.ray_nodes import alive_nodes, in_place
from areal_rloo.launcher.ray_owner import OwnedCommand, Owner
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_FORWARDED = ("AREAL_RLOO_", "HF_", "NCCL_", "GLOO_", "SGLANG_", "WANDB_", "TORCH_")  # variables that go along
_ANSWER_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.5  # a look at one process costs 0.1 ms of the launcher, and there may be hundreds
_ASK_EVERY_S = 5.0
_MISSED_S = 30.0
_LOST = 137  # the code of a process that is gone with its owner, as if killed


class RayStarter:
    """Starts processes in places of a cluster. Ray itself starts again what dies, as often as the plan says."""

    restarts = True

    def __init__(
        self,
        request: JobRequest,
        *,
        learner: PlacementGroup,
        workers: PlacementGroup,
        keeper: Any,
        folder: Path | None,
    ) -> None:
        """
        Args:
            request: the run.
            learner, workers: with a bundle for each rank and for each worker.
            keeper: sits on the learner's host.
            folder: that processes are run in; None for Ray's own.
        """
        places = {f"rollout-{index}": (workers, index) for index in range(len(request.placement.workers))}
        places |= {f"learner-{rank}": (learner, rank) for rank in range(len(request.placement.learner))}
        self._places = places | {"learner": (learner, 0), "warm_start": (learner, 0)}
        self._learner = learner
        self._keeper = keeper
        self._request = request
        self._folder = folder
        self._variables = _variables(request.config)
        self._run_name = f"{request.folder.name}-{uuid.uuid4().hex[:6]}"  # of this start: names are unique in a cluster
        self._num_started = 0

    def start(self, spec: ProcessSpec, log: Path) -> OwnedProcess:
        """Start a process whose output is appended to a file.

        Raises:
            PreflightError: it is of the learner, and its node is gone.
        """
        group, index = self._places[spec.name]
        if group is self._learner and spec.host not in {host.name for host in alive_nodes().values()}:
            raise PreflightError(
                f"{spec.name}: its node {spec.host} is gone, and with it the address that all others know; start the "
                "run again with --resume"
            )
        bundle = group.bundle_specs[index]
        self._num_started += 1
        owner = (
            ray.remote(concurrency_groups={"control": 1})(Owner)
            .options(
                name=f"{self._run_name}/{spec.name}/{self._num_started}",
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=spec.max_restarts,
                scheduling_strategy=in_place(group, index),
            )
            .remote()
        )
        command = OwnedCommand(
            spec=spec,
            run_folder=self._request.folder,
            log=log,
            folder=self._folder,
            variables=self._variables,
        )
        return OwnedProcess(owner, command, place_timeout_s=self._request.config.launcher.place_timeout_s)

    def close(self) -> None:
        """Remove what the learner had in its host's memory."""
        with contextlib.suppress(RayError):
            ray.get(self._keeper.remove.remote(self._request.addresses.segment_folder), timeout=_ANSWER_TIMEOUT_S)


class OwnedProcess:
    """A process somewhere in the cluster, seen through its owner."""

    def __init__(self, owner: Any, command: OwnedCommand, *, place_timeout_s: float) -> None:
        self._owner = owner
        self._asked: Any = owner.is_up.remote()
        self._ending = owner.run.remote(command)
        self._name = command.spec.name
        self._log = command.log
        self._place_timeout_s = place_timeout_s
        self._asked_s = time.monotonic()
        self._missing_since_s: float | None = self._asked_s  # the first question that it has not answered
        self._is_missed = False
        self._looked_s = 0.0
        self._code: int | None = None
        self.label = f"in Ray, on {command.spec.host}"

    def exit_code(self) -> int | None:
        """None while it runs, or while Ray makes its owner anew."""
        now_s = time.monotonic()
        if self._code is None and now_s - self._looked_s > _LOOK_EVERY_S:
            self._looked_s = now_s
            if ray.wait([self._ending], timeout=0)[0]:
                self._end()
            else:
                self._look_for_owner(now_s)
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs; nobody waits for it to arrive."""
        if self.exit_code() is None:
            self._owner.signal.remote(number)

    def kill(self) -> None:
        """End the process and all of its session, then its owner."""
        with contextlib.suppress(RayError):
            if self.exit_code() is not None:
                return
            ray.get(self._owner.kill.remote(), timeout=_ANSWER_TIMEOUT_S)
        self._ended(_LOST, "")

    def _look_for_owner(self, now_s: float) -> None:
        """An owner that Ray makes anew is nowhere until its place is there again, and may never be."""
        if self._asked is None and now_s - self._asked_s > _ASK_EVERY_S:
            self._asked, self._asked_s = self._owner.is_up.remote(), now_s
            self._missing_since_s = self._missing_since_s or now_s
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            with contextlib.suppress(RayError):
                ray.get(self._asked)
                self._missing_since_s = None
            self._asked = None
        missed_s = 0.0 if self._missing_since_s is None else now_s - self._missing_since_s
        if missed_s > self._place_timeout_s:
            words = f"Ray has found no place for it within launcher.place_timeout_s={self._place_timeout_s:g}"
            self._ended(_LOST, words)
        elif missed_s > _MISSED_S and not self._is_missed:
            logger.warning("%s: nothing is heard of its owner; Ray may be looking for a place for it", self._name)
        self._is_missed = missed_s > _MISSED_S

    def _end(self) -> None:
        try:
            code, words = ray.get(self._ending)
        except RayError as error:  # the owner is gone, and Ray will not make it anew any more
            code, words = _LOST, str(error).strip().splitlines()[-1]
        self._ended(code, words)

    def _ended(self, code: int, words: str) -> None:
        self._code = code
        ray.kill(self._owner)  # its place is free for the next one
        if words:
            logger.error("%s: %s", self._name, words)
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                log.write(words + "\n")


def _variables(config: Config) -> Mapping[str, str]:
    """Of this process, that those of the run have too."""
    key = config.rollout.sglang.api_key_env
    return {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED) or name == key}
