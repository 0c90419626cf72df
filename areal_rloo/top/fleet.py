"""Ask the processes of a run for their metrics, by the files that tell Prometheus where they are."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from areal_rloo.telemetry.metric import PREFIX
from areal_rloo.telemetry.targets import Target

_TIMEOUT_S = 2.0
_MOST_AT_A_TIME = 32
_MOST_BYTES = 2**22  # of an answer: another program may listen there now, and send without end
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the processes are on this network


class Answer(NamedTuple):
    """The metrics of a process at a moment; no numbers if it does not answer."""

    at_s: float  # of a monotonic clock
    numbers: dict[str, float]  # by name after the prefix; the sum over labels


class Process(NamedTuple):
    """A process of the run, at the last look and at the one before."""

    name: str
    now: Answer
    before: Answer | None

    def value(self, name: str) -> float | None:
        return self.now.numbers.get(name)

    def per_second(self, name: str) -> float | None:
        """Return the growth of a total since the last look; None if there is none, or if the process is another one."""
        if self.before is None or name not in self.before.numbers or name not in self.now.numbers:
            return None
        grown = self.now.numbers[name] - self.before.numbers[name]
        return grown / (self.now.at_s - self.before.at_s) if grown >= 0 else None


class Fleet:
    """Looks at all processes of a run."""

    def __init__(self) -> None:
        self._before: dict[str, Answer] = {}

    def look(self, targets: Sequence[Target]) -> list[Process]:
        """Ask all processes, the learner first. A process gets 2 s for each part of the answer."""
        with ThreadPoolExecutor(_MOST_AT_A_TIME) as pool:
            answers = list(pool.map(lambda target: _ask(target.url), targets))
        found = [
            Process(target.process, answer, self._before.get(target.process))
            for target, answer in zip(targets, answers, strict=True)
        ]
        self._before = {process.name: process.now for process in found if process.now.numbers}
        return sorted(found, key=lambda process: (process.name != "learner", len(process.name), process.name))


def _ask(url: str) -> Answer:
    at_s = time.monotonic()
    try:
        with _OPENER.open(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read(_MOST_BYTES).decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, http.client.HTTPException, ValueError):  # it has ended, or another program listens there now
        return Answer(at_s, {})
    numbers: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        name = sample.name.removeprefix(PREFIX)
        numbers[name] = numbers.get(name, 0.0) + sample.value
    return Answer(at_s, numbers)
