"""The page of trajectories: loads nothing, shows a fair selection, and treats completions as text."""

import html.parser
import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_rloo.config import Config, dump_config
from areal_rloo.inspect.page import spread, write_page
from areal_rloo.inspect.shown import visible
from areal_rloo.report import write_report
from areal_rloo.telemetry.trajectories import TrajectoryFile, TrajectoryRecord

MakeTrajectory = Callable[..., TrajectoryRecord]

HOSTILE = "\x1b[2J[bold]\x07\x9b31m\u202e</script><script>alert(1)</script>\r\n\x00&amp;"


class Page(html.parser.HTMLParser):
    """Parses elements, attributes that load something, and the data blocks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.blocks: list[Any] = []
        self.shown = ""
        self._data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in {"src", "href", "srcset", "data"}]
        assert not any(name.startswith("on") for name, _ in attributes)
        self._data = ("type", "application/json") in attributes

    def handle_endtag(self, tag: str) -> None:
        self._data = False

    def handle_data(self, data: str) -> None:
        if self._data:
            self.blocks.append(json.loads(data))
        else:
            self.shown += data


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 20))
def test_the_page_selects_whole_groups_within_its_limits(
    make_trajectory: MakeTrajectory, group_ids: list[int], most: int
) -> None:
    records = [make_trajectory(group_id=group_id, item_index=index) for index, group_id in enumerate(group_ids)]
    kept, num_records = spread(records, most=most, most_by_reason=3)
    assert num_records == len(records)
    assert len(kept) <= most
    if len(records) <= most:
        assert kept == records
    groups = {record.group_id for record in kept}
    assert not records or groups
    if len(groups) > 1:
        assert len(kept) == sum(record.group_id in groups for record in records)


def test_the_page_covers_the_whole_run_and_rare_drops(make_trajectory: MakeTrajectory) -> None:
    records = [make_trajectory(policy_version=index, group_id=index) for index in range(1000)]
    records.insert(777, make_trajectory(dropped="reward_error"))
    records += [make_trajectory(dropped="stale", group_id=index) for index in range(500)]
    kept, _ = spread(records, most=100, most_by_reason=10)
    versions = [record.policy_version for record in kept if record.dropped is None]
    assert len(versions) > 50
    assert {later - earlier for earlier, later in pairwise(versions)} == {16}
    assert sum(record.dropped == "reward_error" for record in kept) == 1
    assert 5 <= sum(record.dropped == "stale" for record in kept) <= 10


def test_the_page_loads_nothing_and_shows_hostile_text_as_text(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    hostile = make_trajectory(
        pieces=[HOSTILE, "b"], prompt=HOSTILE, source=HOSTILE, detail=HOSTILE, dropped=HOSTILE, finish_reason=HOSTILE,
        reward_parts={HOSTILE: math.nan}, spans=[1, 1], expected=HOSTILE,
    )  # fmt: skip
    text = write_page(tmp_path, [make_trajectory(), hostile]).read_text()
    page = Page(text)
    assert page.tags.count("script") == 3, "two of data and the page's own"
    assert page.tags.count("details") == 2
    assert page.links == []
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert page.blocks[1]["pieces"] == [visible(HOSTILE), "b"]
    assert "alert(1)</script>" in page.shown


def test_without_scripts_the_page_shows_all_facts_of_a_trajectory(
    tmp_path: Path, make_trajectory: MakeTrajectory
) -> None:
    record = make_trajectory(
        pieces=["one", " tool", " two"], versions=[[7, 2], [8, 1]], spans=[1, 1, 1], reward_parts={"format": 0.25},
        expected="it is 7",
    )  # fmt: skip
    dropped = make_trajectory(dropped="reward_error", detail="Traceback: no", advantage=None, reward=None)
    text = write_page(tmp_path, [record, dropped]).read_text()
    page = Page(text)
    for part in (
        "All 2 recorded",
        "What is 3 + 4?",
        "one tool two",
        "format 0.25",
        "it is 7",
        "version 7: 2 tokens",
        "+0.5",
        "40/3",
    ):
        assert part in page.shown, part
    assert "dropped: reward_error" in page.shown
    assert "Traceback: no" in page.shown
    assert "title='not by the policy: 1 tokens'> tool</span>" in text
    assert page.blocks[0]["runs"] == [[7, True, 1], [7, False, 1], [8, True, 1]]


def test_a_page_of_many_records_gives_the_number_and_stays_small(
    tmp_path: Path, make_trajectory: MakeTrajectory
) -> None:
    records = (make_trajectory(group_id=index // 4, pieces=["word "] * 4000) for index in range(2000))
    text = write_page(tmp_path, records).read_text()
    page = Page(text)
    number = page.tags.count("details")
    assert 225 <= number <= 450
    assert f"{number} of the 2,000 recorded trajectories" in page.shown
    assert len(text) < 30_000_000
    block = page.blocks[0]
    first, left_out = block["gap"]
    assert len(block["pieces"]) + left_out == 4000
    assert 0 < first < len(block["pieces"])
    assert f"… {left_out:,} tokens …" in page.shown


def test_the_report_links_to_the_page_if_trajectories_exist(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    run_folder = tmp_path
    (run_folder / "config.yaml").write_text(dump_config(Config()))
    file = TrajectoryFile(run_folder / "trajectories.jsonl")
    file.append([make_trajectory()])
    file.close()
    report = write_report(run_folder)
    assert Page(report.read_text()).links == ["trajectories.html"]
    assert Page((run_folder / "trajectories.html").read_text()).links == ["report.html"]
    (run_folder / "trajectories.jsonl").unlink()
    assert Page(write_report(run_folder).read_text()).links == []
