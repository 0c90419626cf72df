"""The command `inspect`: filters, orders, output, mistakes, and hostile text of models."""

import io
import math
import operator
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from areal_rloo import program
from areal_rloo.config import Config, dump_config
from areal_rloo.errors import DataError
from areal_rloo.inspect.__main__ import parse_arguments
from areal_rloo.inspect.select import (
    FIELDS,
    Seen,
    matching,
    parse_order,
    parse_sample,
    parse_steps,
    parse_where,
    selected,
    value_of,
)
from areal_rloo.inspect.shown import visible, visible_line
from areal_rloo.inspect.text import View, show, tallied
from areal_rloo.telemetry.trajectories import TrajectoryFile, TrajectoryRecord

MakeTrajectory = Callable[..., TrajectoryRecord]

HOSTILE = "\x1b[2J[bold]\x07\x9b31m\u202e</script><script>alert(1)</script>\r\n\x00&amp;"


@pytest.fixture
def run_folder(tmp_path: Path, make_trajectory: MakeTrajectory) -> Path:
    """A run with three steps of two groups of two, and a drop with a traceback."""
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(Config()))
    file = TrajectoryFile(folder / "trajectories.jsonl")
    for step in range(3):
        file.append(
            make_trajectory(
                policy_version=step,
                group_id=2 * step + group,
                sample_index=sample,
                reward=float(sample),
                reward_parts={"correct": float(sample), "format": 0.5},
                pieces=["word"] * (step + 2 * group + sample + 1),
                source="gsm8k" if group else "arithmetic",
            )
            for group in range(2)
            for sample in range(2)
        )
    file.append(
        [make_trajectory(policy_version=2, reward=None, advantage=None, dropped="reward_error", detail="Traceback: no")]
    )
    file.close()
    return folder


def run_main(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "areal_rloo.inspect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def shown(record: TrajectoryRecord, view: View, *, width: int | None = None) -> str:
    """Return the block for a pipe, or for a terminal of a width."""
    terminal = width is not None
    console = Console(file=io.StringIO(), width=width or 10_000, force_terminal=terminal, color_system=None)
    show(console, record, view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Filters and orders

SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq, "!=": operator.ne}
optional_numbers = st.none() | st.sampled_from([-1.0, 0.0, 0.5, 1.0, math.nan])


@st.composite
def measured(draw: st.DrawFn) -> TrajectoryRecord:
    """Make a record from few values, for ties, with some values missing."""
    count = draw(st.integers(0, 3))
    return TrajectoryRecord(
        policy_version=draw(st.integers(0, 3)),
        group_id=draw(st.integers(0, 3)),
        sample_index=draw(st.integers(0, 3)),
        source="gsm8k",
        epoch=0,
        item_index=0,
        prompt="",
        pieces=["x"] * count,
        token_ids=[0] * count,
        logprobs=draw(st.lists(st.sampled_from([-2.0, -1.0, 0.0]), min_size=count, max_size=count)),
        versions=[[0, count]],
        spans=draw(st.sampled_from([[], [0, count]])),
        reward=draw(optional_numbers),
        reward_parts=draw(st.dictionaries(st.sampled_from(["correct", "format"]), st.sampled_from([0.0, 1.0]))),
        advantage=draw(optional_numbers),
        staleness=draw(st.none() | st.integers(0, 2)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        dropped=None,
    )


def plain_value(record: TrajectoryRecord, name: str) -> float | None:
    own = [] if record.spans else record.logprobs
    value: float | None = {
        "reward": record.reward,
        "advantage": record.advantage,
        "staleness": record.staleness,
        "tokens": len(record.pieces),
        "masked": 0,
        "logprob_min": min(own) if own else None,
        "logprob_mean": sum(own) / len(own) if own else None,
        "step": record.policy_version,
        "reward.correct": record.reward_parts.get("correct"),
    }[name]
    return None if value is None or math.isnan(value) else value


names = st.sampled_from([*FIELDS, "reward.correct"])


@given(st.lists(measured(), max_size=12), names, st.sampled_from(sorted(SIGNS)), st.sampled_from([-1, 0, 0.5, 1]))
def test_a_condition_equals_a_plain_filter(records: list[TrajectoryRecord], name: str, sign: str, value: float) -> None:
    expected = [
        record for record in records if (found := plain_value(record, name)) is not None and SIGNS[sign](found, value)
    ]
    seen = Seen()
    assert list(matching(records, [parse_where(f"{name}{sign}{value}")], seen)) == expected
    assert (seen.num_records, seen.num_matching) == (len(records), len(expected))


@given(st.lists(measured(), max_size=12), names, st.booleans(), st.none() | st.integers(1, 14))
def test_an_order_equals_a_plain_sort(
    records: list[TrajectoryRecord], name: str, descending: bool, limit: int | None
) -> None:
    valued = [record for record in records if plain_value(record, name) is not None]
    without = [record for record in records if plain_value(record, name) is None]
    sign = -1 if descending else 1
    valued.sort(key=lambda record: sign * (plain_value(record, name) or 0.0))
    order = parse_order(f"-{name}" if descending else name)
    found = list(selected(iter(records), order=order, limit=limit))
    assert [id(record) for record in found] == [id(record) for record in (valued + without)[:limit]]


@given(st.lists(measured(), max_size=12), st.integers(1, 14))
def test_without_an_order_the_newest_are_shown(records: list[TrajectoryRecord], limit: int) -> None:
    assert list(selected(iter(records), order=None, limit=limit)) == records[-limit:]
    assert list(selected(iter(records), order=None, limit=None)) == records


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", [3]), ("2:4", [2, 3, 4]), (":1", [0, 1]), ("8:", [8, 9]), (":", list(range(10)))],
)
def test_steps_are_a_number_or_an_inclusive_range(
    make_trajectory: MakeTrajectory, text: str, expected: list[int]
) -> None:
    holds = parse_steps(text)
    assert [step for step in range(10) if holds(make_trajectory(policy_version=step))] == expected


def test_a_sample_is_named_with_or_without_its_part(make_trajectory: MakeTrajectory) -> None:
    first, second = make_trajectory(), make_trajectory(part_index=1)
    assert (first.name, second.name) == ("40/3", "40/3.1")
    assert parse_sample("40/3")(first)
    assert parse_sample("40/3")(second)
    assert not parse_sample("40/3.1")(first)
    assert not parse_sample("40/2")(first)


def test_logprobs_of_tool_tokens_do_not_count(make_trajectory: MakeTrajectory) -> None:
    record = make_trajectory(pieces=["a", "b", "c"], logprobs=[-1.0, 0.0, -3.0], spans=[1, 1, 1])
    assert value_of(record, "logprob_mean") == -2.0
    assert value_of(record, "logprob_min") == -3.0


def test_missing_values_meet_no_condition(make_trajectory: MakeTrajectory) -> None:
    assert not parse_where("reward!=1")(make_trajectory(reward=None))
    assert parse_where("finish_reason!=stop")(make_trajectory(finish_reason="length"))


# Mistakes

MISTAKES = [
    (["--where", "rewrd<1"], "--where 'rewrd<1': no field 'rewrd'; did you mean 'reward'? expected one of advantage,"),
    (["--where", "reward"], "--where 'reward': expected FIELD OPERATOR VALUE, such as 'reward<0.5'"),
    (["--where", "reward<high"], "expected a number to compare reward with, got 'high'"),
    (["--where", "reward<nan"], "expected a number to compare reward with, got 'nan'"),
    (["--where", "finish_reason<stop"], "finish_reason is text; expected = or !=, got <"),
    (["--where", "reward.corect<1"], "no trajectory has a reward part 'corect'; did you mean 'correct'?"),
    (["--sort", "-reward.corect"], "no trajectory has a reward part 'corect'; did you mean 'correct'?"),
    (["--sort", "tokns"], "--sort 'tokns': no field 'tokns'; did you mean 'tokens'?"),
    (["--step", "five"], "--step 'five': expected a policy version or a range"),
    (["--step", "9:5"], "--step '9:5': expected the lower version first, such as 5:9"),
    (["--sample", "40"], "--sample '40': expected GROUP/INDEX"),
    (["--grep", "("], "--grep '(': expected a regular expression"),
    (["--source", "gsm8"], "--source: no trajectory from 'gsm8'; did you mean 'gsm8k'?"),
    (["--dropped", "reward_eror"], "--dropped: no drop for 'reward_eror'; did you mean 'reward_error'?"),
    (["--limit", "-2"], "--limit -2: expected a number of trajectories"),
    (["--bogus"], "unrecognized arguments: --bogus; expected RUN_FOLDER and then options"),
    (["--dropped", "--trained"], "not allowed with argument"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value) if value else "")
def test_a_mistake_gives_the_expected_form(run_folder: Path, arguments: list[str], words: str) -> None:
    from areal_rloo.inspect.__main__ import main

    with pytest.raises(DataError) as raised:
        options = parse_arguments([str(run_folder), *arguments])
        seen = Seen()
        list(matching(read(run_folder), options.conditions, seen))
        options.check(seen)
    assert words in str(raised.value)
    assert program.run_main(main, [str(run_folder), *arguments]) == 2


def read(folder: Path) -> list[TrajectoryRecord]:
    lines = (folder / "trajectories.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=TrajectoryRecord) for line in lines]


def test_a_mistake_prints_one_line_and_exits_with_2(run_folder: Path) -> None:
    ended = run_main(run_folder, "--where", "rewrd<1")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: --where 'rewrd<1': no field 'rewrd'; did you mean 'reward'?")
    assert len(ended.stderr.splitlines()) == 1


def test_a_folder_without_run_or_trajectories_is_refused(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run here"):
        parse_arguments([str(tmp_path)])
    (run_folder / "trajectories.jsonl").unlink()
    with pytest.raises(DataError, match=r"telemetry\.trajectories_per_step above 0"):
        parse_arguments([str(run_folder)])


# Output


def test_filter_and_sort_find_the_longest_wrong_completions(run_folder: Path) -> None:
    ended = run_main(run_folder, "--where", "reward<0.5", "--sort", "-tokens", "--limit", "2")
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^── (\S+)", ended.stdout, re.MULTILINE) == ["5/0", "3/0"]
    assert "reward 0 (correct 0, format 0.5)  advantage +0.5" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "2 of 6 that match, of 13 recorded"
    assert "\x1b" not in ended.stdout, "no color in a pipe"


def test_json_output_is_the_selected_records(run_folder: Path) -> None:
    ended = run_main(run_folder, "--trained", "--source", "gsm8k", "--step", "1:", "--json", "--limit", "0")
    records = [msgspec.json.decode(line, type=TrajectoryRecord) for line in ended.stdout.splitlines()]
    assert records == [
        record
        for record in read(run_folder)
        if record.advantage is not None and record.source == "gsm8k" and record.policy_version >= 1
    ]
    assert len(records) == 4


def test_drops_are_shown_with_reason_and_detail(run_folder: Path) -> None:
    ended = run_main(run_folder, "--dropped")
    assert "dropped: reward_error" in ended.stdout
    assert "Traceback: no" in ended.stdout
    assert "1 of 1 that match" in ended.stdout


def test_group_sample_and_grep_filters_match(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from areal_rloo.inspect.__main__ import main

    for arguments, number in (
        (["--group", "3"], 2),
        (["--sample", "3/1"], 1),
        (["--grep", r"^What.*\?$"], 13),
        (["--grep", "(word){5}"], 3),
        (["--group", "3", "--grep", "answer"], 0),
    ):
        assert main([str(run_folder), "--limit", "0", "--json", *arguments]) == 0
        assert len(capsys.readouterr().out.splitlines()) == number, arguments


def test_a_closed_pipe_ends_the_command_quietly(run_folder: Path, make_trajectory: MakeTrajectory) -> None:
    file = TrajectoryFile(run_folder / "trajectories.jsonl")
    file.append(make_trajectory(prompt="long " * 200) for _ in range(500))
    file.close()
    for shape in ("", "--json"):
        command = f"{sys.executable} -m areal_rloo.inspect '{run_folder}' --limit 0 {shape} | head -n 1"
        ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr, len(ended.stdout.splitlines())) == (0, "", 1)


def test_an_empty_file_or_a_partial_line_is_accepted(run_folder: Path) -> None:
    path = run_folder / "trajectories.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert "of 12 recorded" in run_main(run_folder).stdout
    path.write_bytes(b"")
    ended = run_main(run_folder, "--where", "reward.correct<1")
    assert (ended.returncode, ended.stdout) == (0, "no trajectories yet\n")


def test_the_summary_counts_rewards_and_drops(run_folder: Path) -> None:
    records = read(run_folder)
    by_step = tallied(records, "step")
    assert [(step, tally.number, tally.reward_mean) for step, tally in by_step.items()] == [
        (0, 4, 0.5),
        (1, 4, 0.5),
        (2, 5, 0.5),
    ]
    assert by_step[2].dropped == {"reward_error": 1}
    assert set(tallied(records, "source")) == {"arithmetic", "gsm8k"}
    lines = run_main(run_folder, "--summary").stdout.splitlines()
    assert "reward_error 20 %" in lines[4]
    assert lines[-1] == "13 that match, of 13 recorded"


def test_samples_without_completion_do_not_count_in_the_mean_length(make_trajectory: MakeTrajectory) -> None:
    nothing = {"pieces": [], "token_ids": [], "logprobs": [], "versions": [], "spans": []}
    records = [
        make_trajectory(pieces=["a", "b"], versions=[[0, 2]]),
        make_trajectory(**nothing, reward=None, dropped="reward_timeout", finish_reason=""),
    ]
    (tally,) = tallied(records, "source").values()
    assert (tally.number, tally.num_generated, tally.num_tokens) == (2, 1, 2)


def test_version_changes_and_tool_text_are_marked(make_trajectory: MakeTrajectory) -> None:
    pieces = ["one", " two", " [tool]", " three", " four"]
    record = make_trajectory(pieces=pieces, versions=[[7, 1], [8, 4]], spans=[2, 1, 2])
    assert "⟨v7⟩one⟨v8⟩ two⟦ [tool]⟧ three four" in shown(record, View())
    assert "v7→v8" in shown(record, View())
    assert "⟨v" not in shown(make_trajectory(pieces=pieces), View()), "one version is named once, in the first line"


def test_each_token_has_a_line_with_its_version_and_logprob(make_trajectory: MakeTrajectory) -> None:
    record = make_trajectory(pieces=[" a\n", "b"], versions=[[7, 1], [8, 1]], spans=[1, 1], logprobs=[-0.25, 0.0])
    lines = shown(record, View(tokens=True)).splitlines()
    assert any(re.search(r"0 +100 +v7 +-0\.250 +“ a⏎”$", line) for line in lines)
    assert any(re.search(r"1 +101 +v8 +- +⟦“b”⟧ +not by the policy$", line) for line in lines)


def test_the_expected_answer_is_beside_the_completion(make_trajectory: MakeTrajectory) -> None:
    words = " ".join(shown(make_trajectory(expected="#### 7"), View()).split())
    assert re.search("expected answer.*#### 7$", words)
    assert "expected" not in shown(make_trajectory(), View())


def test_a_long_completion_is_shortened_unless_full(make_trajectory: MakeTrajectory) -> None:
    record = make_trajectory(pieces=[f" {index}" for index in range(1000)], versions=[[3, 500], [4, 500]])
    short = shown(record, View())
    assert "… 760 tokens … ⟨v4⟩" in short
    assert short.rstrip().endswith(" 999")
    assert " 500 501 " in shown(record, View(full=True))


@pytest.mark.parametrize("width", [80, 200])
def test_lines_fit_the_terminal_without_losing_text(make_trajectory: MakeTrajectory, width: int) -> None:
    pieces = [f" w{index}" for index in range(200)]
    parts = {f"part_{index}": 0.25 for index in range(12)}
    text = shown(make_trajectory(pieces=pieces, reward_parts=parts), View(), width=width)
    assert max(map(len, text.splitlines())) <= max(width, len("reward 1 ()") + sum(len(n) + 7 for n in parts))
    for piece in pieces:
        assert re.search(rf"\b{piece.strip()}\b", text)


@given(st.text())
def test_shown_text_has_no_control_characters(text: str) -> None:
    for safe in (visible(text), visible_line(text)):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]", safe)
    assert len(visible_line(text).splitlines()) <= 1


@pytest.mark.parametrize("view", [View(), View(tokens=True), View(full=True, pattern=re.compile("bold"))])
def test_hostile_text_in_a_record_is_shown_as_text(make_trajectory: MakeTrajectory, view: View) -> None:
    record = make_trajectory(
        pieces=[HOSTILE], prompt=HOSTILE, source=HOSTILE, detail=HOSTILE, dropped=HOSTILE, finish_reason=HOSTILE,
        reward_parts={HOSTILE: 1.0}, expected=HOSTILE,
    )  # fmt: skip
    text = shown(record, view)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert text.count("[bold]") == 8, "markup is text"
