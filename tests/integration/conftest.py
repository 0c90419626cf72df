"""Runs that end with their test, and leave nothing behind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_runs import REPO, Run, gone


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
