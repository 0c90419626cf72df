"""Programs import without Python's collector of cycles, and switch it on again before they work."""

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from areal_rloo.program import begin_imports, run_main

PROCESSES = ("areal_rloo.learner", "areal_rloo.rollout")
FIRST_SLOW_IMPORT = """
import gc, runpy, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name in ("torch", "msgspec"):
            print(gc.isenabled())
            raise SystemExit
sys.meta_path.insert(0, Finder())
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


@pytest.fixture
def without_collector() -> Iterator[None]:
    begin_imports()
    yield
    gc.enable()


@pytest.mark.parametrize("module", [*PROCESSES, "areal_rloo.launcher.local", "areal_rloo"])
def test_slow_imports_come_without_the_collector(module: str) -> None:
    command = [sys.executable, "-c", FIRST_SLOW_IMPORT, module, "config"]
    assert subprocess.check_output(command, text=True) == "False\n"


@pytest.mark.usefixtures("without_collector")
def test_a_program_begins_with_the_collector() -> None:
    assert not gc.isenabled()
    assert run_main(lambda _: int(gc.isenabled()), []) == 1
    assert gc.get_freeze_count() > 0, "the modules are left out"


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("module", PROCESSES)
def test_a_process_of_a_run_begins_with_the_collector(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = importlib.import_module(f"{module}.__main__")
    monkeypatch.setattr(process, "show_on_signal", lambda: None)
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit):
        process.main()
    assert gc.isenabled()
