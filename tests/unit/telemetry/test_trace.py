"""Processes record what they do; a process without a trace, or with a full disk, goes on as before."""

import asyncio
import errno
import threading
from pathlib import Path

import pytest
from support.patience import eventually

from areal_rloo.decoding import from_json
from areal_rloo.telemetry import trace
from areal_rloo.telemetry.record_file import RecordFile
from areal_rloo.telemetry.trace import Beginning, Span, record, sample_span, span, traced


def _read(folder: Path, process: str = "learner") -> list[Beginning | Span]:
    lines = (folder / trace.FOLDER_NAME / f"{process}.jsonl").read_bytes().splitlines()
    return [from_json(line, Beginning | Span) for line in lines]


def _spans(folder: Path) -> list[Span]:
    return [line for line in _read(folder) if isinstance(line, Span)]


def test_nothing_is_recorded_without_a_trace(tmp_path: Path) -> None:
    with traced(tmp_path, "learner", on=False), span("training", "step 1"), sample_span("generate", "1/0/1"):
        record("intake", "arrived")
        assert not trace.is_on()
    assert list(tmp_path.iterdir()) == []


def test_spans_moments_and_starts_are_in_the_file_of_the_process(tmp_path: Path) -> None:
    for _ in range(2):
        raising = pytest.raises(ValueError, match="x")
        with traced(tmp_path, "learner", on=True), raising, span("training", "step 1"):
            record("intake", "taken", groups=[1, 2], step=1)
            raise ValueError("x")
    lines = _read(tmp_path)
    assert [type(line) for line in lines] == [Beginning, Span, Span] * 2
    moment, work = _spans(tmp_path)[:2]
    assert (moment.track, moment.name, moment.seconds) == ("intake", "taken", 0)
    assert moment.details == {"groups": [1, 2], "step": 1}
    assert work.name == "step 1"
    assert work.began_s <= moment.began_s <= work.began_s + work.seconds


def test_stages_name_the_sample_of_their_task_and_can_tell_more(tmp_path: Path) -> None:
    async def episode(name: str) -> None:
        with sample_span("episode", name, lease=3):
            with sample_span("generate") as details:
                await asyncio.sleep(0.01)
                details["tokens"] = 5
            await asyncio.create_task(reward())

    async def reward() -> None:
        with sample_span("reward"):
            await asyncio.sleep(0.01)

    async def both() -> None:
        await asyncio.gather(episode("1/0/1"), episode("1/1/2"))
        await reward()  # of a trial, outside of any life

    with traced(tmp_path, "learner", on=True):
        asyncio.run(both())
    spans = _spans(tmp_path)
    for name in ("1/0/1", "1/1/2"):
        own = {line.name: line.details for line in spans if line.details["sample"] == name}
        assert own == {
            "generate": {"sample": name, "tokens": 5},
            "reward": {"sample": name},
            "episode": {"sample": name, "lease": 3},
        }
    assert len(spans) == 6


def test_all_threads_record_whole_lines(tmp_path: Path) -> None:
    with traced(tmp_path, "learner", on=True):
        threads = [threading.Thread(target=lambda: [record("a", "b", n=n) for n in range(1000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(line.details["n"] for line in _spans(tmp_path)) == sorted(list(range(1000)) * 8)


def test_the_first_spans_are_on_the_disk_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process, and a look at a running one."""
    monkeypatch.setattr(trace, "_WRITE_EVERY_S", 0.01)
    with traced(tmp_path, "learner", on=True):
        record("intake", "arrived")
        eventually(lambda: len(_spans(tmp_path)) == 1, "the span, although no other follows")


def test_a_disk_that_refuses_ends_the_trace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: RecordFile, lines: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with traced(tmp_path, "learner", on=True):
        monkeypatch.setattr(RecordFile, "append", refuse)
        monkeypatch.setattr(trace, "_BLOCK_BYTES", 0)
        for _ in range(3):
            record("intake", "arrived")
    assert _spans(tmp_path) == []
    assert caplog.text.count("learner.jsonl ends here: [Errno 28] No space left on device") == 1


def test_a_folder_that_cannot_be_made_ends_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / trace.FOLDER_NAME).write_text("in the way")
    with traced(tmp_path, "learner", on=True):
        record("intake", "arrived")
        assert not trace.is_on()
    assert "no trace of this process" in caplog.text


def test_a_file_has_a_limit_over_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "MOST_BYTES", 1000)
    for _ in range(2):
        with traced(tmp_path, "learner", on=True):
            monkeypatch.setattr(trace, "_BLOCK_BYTES", 0)
            for _ in range(20):
                record("intake", "arrived")
    assert 0 < (tmp_path / trace.FOLDER_NAME / "learner.jsonl").stat().st_size <= 1000
    assert caplog.text.count("ends here: it has 1,000 bytes") == 2
