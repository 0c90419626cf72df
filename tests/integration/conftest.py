"""Runs that end with their test, and leave nothing behind; and the ends of a wire."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_runs import REPO, Run, gone
from support.workers import Ends, make_ends


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    monkeypatch.setenv("AREAL_RLOO_CACHE", str(REPO / ".pytest_cache" / "models"))
    runs: list[Run] = []

    def begin(*arguments: str, name: str = "run", **options: Any) -> Run:
        runs.append(Run(tmp_path / name, *arguments, **options))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert gone(run), "orphans"


@pytest.fixture(params=["ipc", "tcp", *(["tcp6"] if socket.has_dualstack_ipv6() else [])])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Ends:
    return make_ends(request.param, tmp_path)
