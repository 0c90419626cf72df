"""Traces of several processes and hosts become one story on one clock, and a file that Perfetto can draw."""

import gzip
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.__main__ import main
from areal_rloo.config import Config, dump_config
from areal_rloo.errors import DataError
from areal_rloo.telemetry.trace import FOLDER_NAME, SAMPLES, Beginning, Detail, Span
from areal_rloo.trace import joined
from areal_rloo.trace.joined import Event, read_traces
from areal_rloo.trace.lives import life_of, lives
from areal_rloo.trace.perfetto import FILE_NAME, trace_events, write_perfetto

HERE, THERE = "host-a", "host-b"


def _write(folder: Path, process: str, *lines: Beginning | Span, broken: bytes = b"") -> None:
    (folder / FOLDER_NAME).mkdir(exist_ok=True)
    with (folder / FOLDER_NAME / f"{process}.jsonl").open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + broken)


def _intake(at_s: float, name: str, **details: Detail) -> Span:
    return Span("intake", name, at_s, 0.0, details)


def _lease(at_s: float, name: str, group: int = 4, lease: int = 7) -> Span:
    return _intake(at_s, name, group=group, samples=[0], lease=lease)


def _begins(learner: str = "one", at_s: float = 9.0) -> Span:
    return _intake(at_s, "begins", learner=learner)


def _episode(
    began_s: float, seconds: float, group: int = 4, lease: int = 7, number: int = 1, learner: str = "one"
) -> Span:
    details: dict[str, Detail] = {"sample": f"{group}/0/{number}", "lease": lease, "purpose": "train"}
    return Span(SAMPLES, "episode", began_s, seconds, {**details, "learner": learner})


def _stage(name: str, began_s: float, seconds: float, **details: Detail) -> Span:
    return Span(SAMPLES, name, began_s, seconds, {"sample": "4/0/1", **details})


def _a_life(folder: Path, *, worker_host: str = HERE, ahead_s: float = 0.0, wall_s: float = 0.0) -> None:
    """Write a sample of the seconds 10 to 15; the worker's clock and its wall clock are ahead by this much."""
    learner = [Beginning("learner", HERE, 1000.0, 0.0), _begins(), _lease(10.0, "granted"), _lease(15.0, "arrived")]
    step = Span("training", "step 3", 16.0, 2.0, {})
    _write(folder, "learner", *learner, _intake(16.0, "taken", groups=[4], step=3), step)
    stages = [_stage("generate", 11.0 + ahead_s, 2.0, tokens=5), _stage("reward", 13.0 + ahead_s, 1.0)]
    beginning = Beginning("rollout-0", worker_host, 1000.0 + wall_s, ahead_s)
    _write(folder, "rollout-0", beginning, *stages, _episode(10.5 + ahead_s, 4.0), broken=b'["span","tra')


@pytest.mark.parametrize(("host", "ahead_s", "wall_s"), [(HERE, 0.0, 0.0), (THERE, 5000.0, 0.3), (THERE, -7.0, 60.0)])
def test_a_life_is_told_on_one_clock(host: str, ahead_s: float, wall_s: float, tmp_path: Path) -> None:
    """A wall clock that is a minute off contradicts the messages; one that is a little off does not."""
    _a_life(tmp_path, worker_host=host, ahead_s=ahead_s, wall_s=wall_s)
    (life,) = lives(read_traces(tmp_path))
    assert life.episode is not None
    assert life.taken is not None
    assert (life.granted_s, life.arrived_s, life.taken.began_s) == (1.0, 6.0, 7.0)
    assert life.episode.began_s == pytest.approx(1.5, abs=0.5)
    assert life.granted_s <= life.episode.began_s
    assert life.episode.ended_s <= life.arrived_s
    assert [stage.name for stage in life.stages] == ["generate", "reward"]
    if host == HERE:
        assert life_of(read_traces(tmp_path), (4, 0)) == [
            "lease 7, 1.000 s after the start of the trace",
            "    0.500 s  begins at rollout-0",
            "    1.000 s  generate, tokens 5, 2.000 s",
            "    3.000 s  reward, 1.000 s",
            "    4.500 s  ends, 4.000 s",
            "    5.000 s  arrives at the learner",
            "    6.000 s  taken for step 3, waited, 1.000 s",
        ]
        assert life_of(read_traces(tmp_path), (4, 1)) == []


delays = st.floats(0, 5)


@given(st.lists(st.tuples(delays, delays, delays), min_size=1, max_size=8), st.floats(-1e6, 1e6), st.floats(-100, 100))
def test_no_clock_puts_an_effect_before_its_cause(
    messages: list[tuple[float, float, float]], ahead_s: float, wall_s: float
) -> None:
    learner = joined._Start(Beginning("learner", HERE, 0.0, 0.0), [_begins()])
    worker = joined._Start(Beginning("rollout-0", THERE, wall_s, ahead_s), [])
    for number, (there_s, works_s, back_s) in enumerate(messages):
        at_s = 10.0 * number
        learner.spans.append(_lease(at_s, "granted", group=number, lease=number))
        worker.spans.append(_episode(at_s + there_s + ahead_s, works_s, group=number, lease=number))
        learner.spans.append(_lease(at_s + there_s + works_s + back_s, "arrived", group=number, lease=number))
    offset_s = joined._offsets([learner, worker])[THERE]
    error_s, least_s, most_s = offset_s + ahead_s, -min(m[0] for m in messages), min(m[2] for m in messages)
    assert least_s - 1e-6 <= error_s <= most_s + 1e-6, "no sample begins before its lease, or arrives before its end"


@pytest.mark.parametrize("host", [HERE, THERE])
def test_a_restarted_learner_counts_leases_anew(host: str, tmp_path: Path) -> None:
    """The sample comes again under the same lease id, from a learner that knows nothing of the first, on any host."""
    first = [Beginning("learner", HERE, 1000.0, 0.0), _begins("one", 0.0), _lease(10.0, "granted")]
    first += [_lease(12.5, "arrived"), _intake(13.0, "taken", groups=[4], step=1)]
    second = [Beginning("learner", host, 5000.0, 4000.0), _begins("two", 4000.0), _lease(4020.0, "granted")]
    second += [_lease(4025.0, "arrived"), _intake(4026.0, "taken", groups=[4], step=1)]
    _write(tmp_path, "learner", *first, *second)
    _write(tmp_path, "rollout-0", Beginning("rollout-0", THERE, 1000.0, 0.0), _episode(11.0, 1.0))
    _write(tmp_path, "rollout-0", _episode(4021.0, 1.0, learner="two"))
    before, after = lives(read_traces(tmp_path))
    for life, at_s in ((before, 10.0), (after, 4020.0)):
        assert life.episode is not None
        assert life.taken is not None
        assert (life.granted_s, life.episode.began_s) == (at_s, at_s + 1)
    assert (before.arrived_s, after.arrived_s) == (12.5, 4025.0)
    assert before.taken is not None and before.taken.began_s == 13.0
    assert sum("waited" in line for line in life_of(read_traces(tmp_path), (4, 0))) == 2


def test_a_restarted_worker_gives_a_name_again(tmp_path: Path) -> None:
    """The second episode gets a lane of its own, because the lane of the first is another sample's now."""
    spans = [_episode(10.0, 5.0), _episode(16.0, 5.0, group=5, lease=8), _episode(17.0, 5.0, learner="two")]
    _write(tmp_path, "rollout-0", Beginning("rollout-0", HERE, 0.0, 0.0), *spans)
    drawn = [line for line in trace_events(read_traces(tmp_path)) if line["ph"] == "X"]
    assert [line["tid"] for line in drawn] == [1, 1, 2]


def test_evaluations_and_killed_workers_leave_no_half_lives(tmp_path: Path) -> None:
    evaluation = Span(SAMPLES, "episode", 1.0, 1.0, {"sample": "-3/0/1", "lease": 2, "purpose": "eval"})
    _write(tmp_path, "rollout-0", Beginning("rollout-0", HERE, 0.0, 0.0), evaluation, _stage("generate", 3.0, 1.0))
    events = read_traces(tmp_path)
    assert lives(events) == []
    assert sum(event["ph"] == "X" for event in trace_events(events)) == 2, "both are drawn"


def test_a_sample_without_a_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _a_life(tmp_path)
    (tmp_path / "config.yaml").write_text(dump_config(Config()))
    assert main(["inspect", str(tmp_path), "--life", "4/0"]) == 0
    assert main(["inspect", str(tmp_path), "--life", "4/1"]) == 2
    assert "--life 4/1: expected a sample of the traces" in capsys.readouterr().err


def test_a_run_without_traces_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no traces here; expected traces/ of a run with telemetry\.trace=true"):
        read_traces(tmp_path)


@pytest.mark.parametrize(
    "damaged",
    [
        _intake(12.0, "arrived", group=4, lease=7),
        _intake(12.0, "arrived", group="4", samples=[0], lease=7),
        _intake(12.0, "taken", step=3),
        _intake(12.0, "taken", groups=[4]),
        _intake(12.0, "begins"),
        Span(SAMPLES, "generate", 12.0, 1.0, {}),
        Span(SAMPLES, "episode", 12.0, 1.0, {"sample": "4/x", "lease": 7, "purpose": "train"}),
    ],
)
def test_a_damaged_span_is_left_out(damaged: Span, tmp_path: Path) -> None:
    _a_life(tmp_path)
    told = life_of(read_traces(tmp_path), (4, 0))
    _write(tmp_path, "rollout-0", Beginning("rollout-0", HERE, 1000.0, 0.0), damaged)
    assert life_of(read_traces(tmp_path), (4, 0)) == told
    write_perfetto(tmp_path)


def test_long_files_share_what_short_ones_leave(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for process, num in (("learner", 10), ("rollout-0", 1000), ("rollout-1", 1000)):
        spans = [Span("engine", "decode", float(n), 0.5, {}) for n in range(num)]
        _write(tmp_path, process, Beginning(process, HERE, 0.0, 0.0), *spans)
    events = read_traces(tmp_path, most_bytes=2**14)
    num_read = Counter(event.process for event in events)
    assert num_read["learner"] == 10
    assert 150 < num_read["rollout-0"] == num_read["rollout-1"] < 2**14 / 2 / 30
    assert caplog.text.count("only the first") == 2
    assert len(read_traces(tmp_path)) == 2010, "a life is looked for in all"


spans_of_track = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30)


@given(spans_of_track, spans_of_track)
def test_every_thread_of_the_picture_is_properly_nested(
    work: Sequence[tuple[int, int]], samples: Sequence[tuple[int, int]]
) -> None:
    """Perfetto draws work that overlaps only in part wrongly, without a word."""
    events = [Event("learner", "weights", f"offer {n}", float(at), float(dur), {}) for n, (at, dur) in enumerate(work)]
    for number, (at, seconds) in enumerate(samples):
        details: dict[str, Detail] = {"sample": f"{number}/0/{number}", "lease": number, "purpose": "train"}
        events.append(Event("rollout-0", SAMPLES, "episode", float(at), float(seconds), details))
        events.append(Event("rollout-0", SAMPLES, "generate", at + seconds / 4, seconds / 2, details))
    drawn = [line for line in trace_events(sorted(events, key=lambda event: event.began_s)) if line["ph"] == "X"]
    assert len(drawn) == len(events)
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for line in drawn:
        threads[line["pid"], line["tid"]].append(line)
    for lines in threads.values():
        for one in lines:
            for other in lines:
                ends, other_ends = one["ts"] + one["dur"], other["ts"] + other["dur"]
                overlap = one["ts"] < other["ts"] < ends - 2
                assert not overlap or other_ends <= ends + 2, (one, other)
        of_samples = sorted((line["ts"], line["ts"] + line["dur"]) for line in lines if line["name"].startswith("sam"))
        assert all(first[1] <= second[0] + 2 for first, second in itertools.pairwise(of_samples)), "one at a time"


def test_the_file_has_all_processes_and_arrows_between_them(tmp_path: Path) -> None:
    _a_life(tmp_path)
    assert write_perfetto(tmp_path) == tmp_path / FILE_NAME
    with gzip.open(tmp_path / FILE_NAME) as file:
        lines = json.load(file)["traceEvents"]
    meta = {(line["name"], line["pid"], line["tid"]): line["args"] for line in lines if line["ph"] == "M"}
    processes = {pid: args["name"] for (name, pid, _), args in meta.items() if name == "process_name"}
    assert processes == {1: "learner", 2: "rollout-0"}
    drawn = {line["name"]: line for line in lines if line["ph"] == "X"}
    assert drawn.keys() == {"sample 4/0/1", "generate", "reward", "group 4", "step 3"}
    assert drawn["step 3"]["ts"] == 7e6
    assert drawn["generate"]["tid"] == drawn["sample 4/0/1"]["tid"], "the stages are in the lane of the sample"
    assert (drawn["group 4"]["ts"], drawn["group 4"]["dur"]) == (6e6, 1e6)
    arrows = {line["id"]: (line["ph"], line["pid"], line["tid"], line["ts"]) for line in lines if line["ph"] in "sf"}
    assert len(arrows) == 2
    for begins, ends in (("sample 4/0/1", "group 4"), ("group 4", "step 3")):
        number = next(line["id"] for line in lines if line["ph"] == "s" and line["tid"] == drawn[begins]["tid"])
        arrow = {line["ph"]: line for line in lines if line.get("id") == number}
        assert arrow["f"]["tid"] == drawn[ends]["tid"]
        for end, span in ((arrow["s"], drawn[begins]), (arrow["f"], drawn[ends])):
            assert span["ts"] <= end["ts"] <= span["ts"] + span["dur"], "an arrow outside of a span is not drawn"
