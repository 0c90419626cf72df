"""The user's code in a run is named with digests, and a resume with another file says so."""

from pathlib import Path

import pytest

from areal_rloo.config import load_config
from areal_rloo.launcher.placement import Host
from areal_rloo.launcher.run_folder import write_beginning
from areal_rloo.report.page import _own_code
from areal_rloo.telemetry.own_code import changed_own_code, own_code, own_code_lines, recorded_own_code

HOST = Host("here", "127.0.0.1", 2, (), 2**34)
OPTIONS = (
    "run.entry=script.py",
    "data.train={task: 'mine.py:Task', rewards: [{function: 'entry:reward'}, {task: arithmetic}]}",
    "data.eval=null",
    "data.curriculum=mine.py:order",
    "rollout.episode.type=other:Episode",
    "algorithm.group_filter=mine.py:keep",
    "algorithm.advantages=package.part:advantages",
    "algorithm.sample_weights=mine.py:weights",
    "algorithm.loss.kind=absent.py:loss",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("script.py", "mine.py", "other.py", "package/part.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise SystemExit('{name} is not imported')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_part_by_import_path_has_the_digest_of_its_file() -> None:
    code = own_code(load_config("quickstart.yaml", OPTIONS))
    assert list(code) == [
        *("run.entry", "data.train.task", "data.train.rewards.0.function", "data.curriculum", "rollout.episode.type"),
        *("algorithm.group_filter", "algorithm.advantages", "algorithm.sample_weights", "algorithm.loss.kind"),
    ]
    digests = {key: part.digest for key, part in code.items()}
    assert digests["run.entry"] == digests["data.train.rewards.0.function"]
    assert digests["data.train.task"] == digests["algorithm.sample_weights"] == digests["data.curriculum"]
    assert len({*digests.values()} - {None}) == 4
    assert digests["algorithm.loss.kind"] is None
    assert own_code_lines(code)[-1] == "your code: algorithm.loss.kind=absent.py:loss (digest ?)"
    assert own_code(load_config("quickstart.yaml")) == {}


def test_tools_of_the_run_and_of_sources_are_named() -> None:
    tools = "{type: tool_use, tools: [calculator, 'mine.py:search']}"
    options = (f"rollout.episode={tools}", f"data.train={{task: arithmetic, episode: {tools}}}", "data.eval=null")
    code = own_code(load_config("quickstart.yaml", options))
    assert list(code) == ["data.train.episode.tools.1", "rollout.episode.tools.1"]
    assert len({part.digest for part in code.values()} - {None}) == 1


def test_a_start_records_the_code_and_a_resume_says_the_changed_files(folder: Path) -> None:
    config, run = load_config("quickstart.yaml", OPTIONS), folder / "run"
    run.mkdir()
    assert [write_beginning(run, config, [HOST]) for _ in range(2)] == [[], []]
    before = own_code(config)
    assert recorded_own_code((run / "environment.jsonl").read_bytes()) == before
    (folder / "package" / "part.py").write_text("changed\n")
    digests = f"{before['algorithm.advantages'].digest} -> {own_code(config)['algorithm.advantages'].digest}"
    assert write_beginning(run, config, [HOST]) == [
        f"resume: algorithm.advantages: package.part:advantages has changed (digest {digests}); the run goes on with "
        "the present file"
    ]
    others = load_config("quickstart.yaml", [*OPTIONS, "algorithm.advantages=mine.py:advantages"])
    assert write_beginning(run, others, [HOST]) == [], "the changed option is said by its key"
    assert "<td>algorithm.group_filter<td>mine.py:keep<td class=soft>digest" in _own_code(run)


@pytest.mark.parametrize("earlier", [b"", b"cut", b'{"code": {}}\n'])
def test_without_a_record_no_change_is_said(earlier: bytes) -> None:
    assert changed_own_code(earlier, own_code(load_config("quickstart.yaml", OPTIONS))) == []
