"""The exit code and the words of a run whose warm start dies, with a scripted process in place of the warm start."""

from collections.abc import Callable
from pathlib import Path

import pytest

from areal_rloo.config import load_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.fleet import LocalRoom
from areal_rloo.launcher.hosts import ClaimedGpus
from areal_rloo.launcher.job import Job, Signals
from areal_rloo.launcher.placement import Host, place, with_counts
from areal_rloo.launcher.plan import JobRequest, ProcessSpec, wire_address
from areal_rloo.launcher.supervisor import Handle
from areal_rloo.learner.stretches import begin_stretch
from areal_rloo.telemetry.metrics import MetricsFile, RecordTail
from areal_rloo.telemetry.records import EvalRecord, TrainRecord


class _Ended:
    """A process that has ended."""

    label = "scripted"

    def __init__(self, code: int) -> None:
        self._code = code

    def exit_code(self) -> int:
        return self._code

    def signal(self, number: int) -> None:
        pass  # as the launcher stops everything at the end

    def kill(self) -> None:
        pass


class _Starter:
    """Starts processes that have ended with a code and an output: the next of the codes, or the last one again."""

    restarts = False

    def __init__(self, *codes: int, output: str) -> None:
        self._codes, self._output = codes, output
        self.num_starts = 0

    def start(self, spec: ProcessSpec, log: Path) -> Handle:
        assert spec.name == "warm_start", "nothing starts after a failed warm start"
        log.write_text(self._output)
        code = self._codes[min(self.num_starts, len(self._codes) - 1)]
        self.num_starts += 1
        return _Ended(code)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_RLOO_CACHE", str(tmp_path / "cache"))


def _job(folder: Path, code: int, output: str) -> Job:
    return _job_of(folder, _Starter(code, output=output))


def _job_of(folder: Path, starter: _Starter, *overrides: str) -> Job:
    here = Host("here", "127.0.0.1", 4, (), 2**34)
    config = with_counts(load_config("quickstart.yaml", ["telemetry.progress=false", *overrides]), [here])
    wire = wire_address(config, 1, folder)
    request = JobRequest(config, place(config, [here]), folder, wire, 9, resume=False)
    return Job(request, starter, LocalRoom(here, ClaimedGpus()), Signals())


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_rloo.launcher.supervisor._BACKOFF_S", (0.0,))


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_killed_warm_start_starts_anew_as_often_as_a_learner(
    tmp_path: Path, max_restarts: int, capfd: pytest.CaptureFixture[str]
) -> None:
    starter = _Starter(137, output="")
    assert _job_of(tmp_path, starter, f"launcher.max_learner_restarts={max_restarts}").run() == 137
    assert starter.num_starts == 1 + max_restarts
    said = capfd.readouterr().err
    assert said.count("the warm start ended with code 137 (SIGKILL)") == 1 + max_restarts
    told = [f"; restart {number} of {max_restarts} in 0.0 s. Was" in said for number in range(1, max_restarts + 1)]
    assert all(told)


@pytest.mark.parametrize(("codes", "num_starts"), [((0,), 1), ((2,), 1), ((137, 0), 2), ((139, 2), 2)])
def test_a_warm_start_that_succeeds_or_refuses_ends_the_restarts(
    tmp_path: Path, codes: tuple[int, ...], num_starts: int
) -> None:
    starter = _Starter(*codes, output="")
    with pytest.raises(PreflightError):  # no model, or a mistake
        _job_of(tmp_path, starter).run()
    assert starter.num_starts == num_starts


@pytest.mark.parametrize(
    ("code", "output", "words"),
    [
        (137, "", "the warm start ended with code 137 (SIGKILL). Was there too little memory?\n"),
        (143, "", "the warm start ended with code 143 (SIGTERM).\n"),
        (1, "Traceback\nOSError: no space", "the warm start ended with code 1. OSError: no space\n"),
    ],
)
def test_a_warm_start_that_dies_gives_the_run_its_exit_code(
    tmp_path: Path, code: int, output: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    starter = _Starter(code, output=output)
    job = _job_of(tmp_path, starter)
    assert job.run() == code
    assert starter.num_starts == (3 if code > 128 else 1), "an error would come again"
    assert not job.unfinished
    said = capfd.readouterr().err
    assert words in said
    assert f"log: {tmp_path / 'logs' / 'warm_start.out'}" in said


def test_a_mistake_found_by_the_warm_start_is_the_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"^model\.tiny: no$"):
        _job(tmp_path, 2, "error: model.tiny: no\n").run()


def test_a_run_without_a_train_step_says_who_waits_for_whom(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_rloo.launcher.learner_log._EVERY_S", 0.0)
    job = _job(tmp_path, 0, "")
    words = "waits for the next batch, 60 s so far: 0 groups ready; samples dropped so far: 8 group_filter"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner.log").write_text(f"2026-01-02T03:04:05.006Z WARNING learner service: {words}\n")
    job._look_around(RecordTail(tmp_path / "metrics.jsonl"))
    said = capfd.readouterr().err
    assert f"no train step for 0 s; the learner says: {words} ({tmp_path / 'logs' / 'learner.log'})\n" in said


@pytest.mark.parametrize(("num_prompts", "shown"), [(200, "eval 0.625@v4"), (8, "eval -")])
def test_a_resume_recalls_accuracies_of_the_same_set(
    tmp_path: Path,
    make_train_record: Callable[..., TrainRecord],
    eval_record: EvalRecord,
    num_prompts: int,
    shown: str,
) -> None:
    begin_stretch(tmp_path, load_config("quickstart.yaml", [f"data.eval.num_prompts={num_prompts}"]), 0)
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for record in (make_train_record(policy_version=4), eval_record):
        file.append(record)
    file.close()
    job = _job(tmp_path, 0, "")
    job._look_around(RecordTail(tmp_path / "metrics.jsonl"), shows=False)
    assert shown in job._progress.line()


def test_a_disk_with_less_room_than_a_checkpoint_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = _job(tmp_path, 0, "")
    written = tmp_path / "checkpoints" / "step-000004" / "shards"
    written.mkdir(parents=True)
    with (written / "sparse").open("wb") as file:
        file.truncate(3 * 10**12)
    for free in (4 * 10**12, 2 * 10**12):
        job._warn_of_disk(free)
    said = capfd.readouterr().err
    assert said.count("free some disk") == 1
    assert "has 2000000000000 bytes free: training goes on, but a checkpoint or launcher.min_free_disk_bytes" in said
