"""Shared by all tests: where the data is, small models, blocked event loops, and which tests run."""

import gc
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.event_loops import BlockedLoops, watched_loops

# No time is asserted, not even by a library.
settings.register_profile("areal_rloo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("areal_rloo")

REPO = Path(__file__).resolve().parent.parent
PASSED = "areal_rloo/passed"
BEGAN_S = float(os.environ.setdefault("AREAL_RLOO_TESTS_BEGAN_S", f"{time.monotonic()}"))  # of all processes together
LONGEST = (  # files of several minutes run first, so that no process works alone at the end
    *("test_learning.py", "test_slurm_runs.py", "test_ray_runs.py"),
    "test_server_runs.py",  # short: it waits behind test_learning.py, because pytest-xdist gives a process another file
    # as soon as the process has two tests left
    *("test_server_failures.py", "test_server_engine.py", "test_server_external.py", "test_server_dies.py"),
    *("test_server_proof.py", "test_compiled.py", "test_server_many_updates.py", "test_learner_runs.py"),
    "test_examples.py",
    "test_ranks.py",  # finds in the cache of the compiler what test_compiled.py compiled
)


@pytest.hookimpl(optionalhook=True)  # also works without pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, because whole runs wait a lot; at most 4, because each takes a gigabyte or two."""
    return int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or min(4, 1 + len(os.sched_getaffinity(0))))


def pytest_configure() -> None:
    os.environ["AREAL_RLOO_SGLANG_FORKS"] = "1"  # see tests/sglang/shims/areal_rloo_sglang.py
    os.environ["AREAL_RLOO_VLLM_FORKS"] = "1"  # see tests/vllm/shims/areal_rloo_vllm_forks.py
    if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several tests, which wait for each other, would only spin
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--not-passed-before", action="store_true", help="leave out the tests that passed in a run before")
    parser.addoption("--minutes", type=float, default=float("inf"), help="skip the tests that have not begun by then")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remember the tests that passed, for `--not-passed-before`."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None or not config.pluginmanager.hasplugin("cacheprovider"):
        return
    passed = {report.nodeid for report in reporter.stats.get("passed", [])} | _passed_before(config)
    config.cache.set(PASSED, sorted(passed))


def _passed_before(config: pytest.Config) -> set[str]:
    """Return the tests to leave out; none without `--not-passed-before`."""
    return set(config.cache.get(PASSED, [])) if config.getoption("--not-passed-before") else set()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Look for no cycles meanwhile: thousands of tests would be looked at again and again, for a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = _passed_before(config)
    items[:] = [item for item in items if item.nodeid not in passed]
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = 0 if marker is None else (*marker.args, 1)[0]
        if needed > num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, here are {num_gpus}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if time.monotonic() - BEGAN_S > 60 * minutes:
        pytest.skip(f"--minutes={minutes:g} are over")


@pytest.fixture
def no_blocked_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockedLoops]:
    """Run event loops in asyncio's debug mode, and fail if a callback blocks a loop for `limit_s` or longer."""
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")  # for the loops made from now on
    with watched_loops(monkeypatch) as blocked:
        yield blocked
    blocked.check()


@pytest.fixture(scope="session", autouse=True)
def folder_of_sockets(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Name a folder for `fresh_address`; the path of a test's own folder may be too long for a socket."""
    os.environ["AREAL_RLOO_TEST_SOCKETS"] = str(tmp_path_factory.mktemp("sockets"))


@pytest.fixture(scope="session")
def gsm8k_folder() -> Path:
    """The real GSM8K: $AREAL_RLOO_DATA, or ../shared/data beside the checkout."""
    folder = Path(os.environ.get("AREAL_RLOO_DATA", REPO.parent / "shared" / "data")) / "gsm8k"
    if not (folder / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K in {folder}; set AREAL_RLOO_DATA to a folder with gsm8k/train.jsonl and test.jsonl")
    return folder


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Real data of several tasks: $AREAL_RLOO_DATA, or ../shared/data beside the checkout."""
    folder = Path(os.environ.get("AREAL_RLOO_DATA", REPO.parent / "shared" / "data"))
    if not (folder / "math500" / "test.jsonl").is_file():
        pytest.skip(f"no MATH-500 in {folder}; set AREAL_RLOO_DATA to a folder with math500/test.jsonl")
    return folder


@pytest.fixture(autouse=True)
def other_tests_log_as_before() -> Iterator[None]:
    """Undo what a test sets up with `setup_logs`, or with the main function of a process."""
    loggers = [logging.getLogger(name) for name in ("areal_rloo", "asyncio")]  # noqa: TID251 - only to put them back
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        for handler in logger.handlers:
            if handler not in handlers:
                handler.close()
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers


@pytest.fixture(scope="session")
def golden_cases() -> list[dict[str, Any]]:
    """Reference values of other systems' own functions: $AREAL_RLOO_GOLDEN, or ../shared/golden beside the checkout."""
    folder = Path(os.environ.get("AREAL_RLOO_GOLDEN", REPO.parent / "shared" / "golden"))
    files = sorted(folder.glob("golden*.json"))
    if not files:
        pytest.skip(f"no reference values in {folder}; set AREAL_RLOO_GOLDEN to a folder with golden_public.json")
    return [case for file in files for case in json.loads(file.read_text())]


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random checkpoint of each architecture, by name; weights large enough for distributions with a shape."""
    return {name: _checkpoint(name, tmp_path_factory.mktemp(name)) for name in ("qwen2", "qwen3", "llama")}


def _checkpoint(architecture: str, folder: Path, **sizes: int) -> Path:
    from areal_rloo.config import TinyModelConfig
    from areal_rloo.models.tiny import make_tiny_model, save_tiny_model

    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, **sizes}
    model = make_tiny_model(TinyModelConfig(architecture=architecture, warm_start=None, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    save_tiny_model(model, folder)
    return folder


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with heads of 32: vLLM's attention on a CPU refuses 16."""
    from support.server_support import MODEL_TOKENS

    return _checkpoint("qwen2", tmp_path_factory.mktemp("wide"), num_heads=2, max_position=MODEL_TOKENS)


@pytest.fixture(scope="session")
def folder(tiny_folders: dict[str, Path]) -> Path:
    """The checkpoint for tests that need no particular architecture."""
    return tiny_folders["qwen2"]
