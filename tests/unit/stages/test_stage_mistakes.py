"""Wrong arguments of evaluate, generate and export: a line that names the argument, exit code 2, nothing left."""

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from areal_rloo.__main__ import main
from areal_rloo.config import dump_config, load_config
from areal_rloo.errors import PreflightError
from areal_rloo.learner import checkpoint
from areal_rloo.stages import export
from areal_rloo.stages.generate import Row, _close, _opened
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.records import EvalRecord

ROW = Row("sums", 3, 1, "1+1=", [5, 6], "2", [7], [-0.5], [], 4, 1.0, {"correct": 1.0}, "stop", None)


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder with two checkpoints, whose model has no weights; nothing else may appear beside it."""
    folder = tmp_path / "runs" / "one"
    for step in (2, 10):
        model = folder / "checkpoints" / f"step-{step:06d}" / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model.parent / "config.yaml").write_text(dump_config(load_config("quickstart.yaml")))
    (folder / "config.yaml").write_text(dump_config(load_config("quickstart.yaml")))
    (folder / "metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export, "is_whole", lambda path: True)
    yield folder


def refusal(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    output = capfd.readouterr()
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["evaluate"], "expected either a RUN_FOLDER or --config X.yaml"),
        (["evaluate", "runs/one", "--config", "quickstart.yaml"], "expected either a RUN_FOLDER or --config"),
        (["evaluate", "nowhere"], "nowhere: no run here"),
        (["evaluate", "runs/one", "--step", "3"], "'--step': expected a step with a checkpoint (2, 10), got 3"),
        (["evaluate", "--config", "quickstart.yaml", "--step", "3"], "'--step': expected with a RUN_FOLDER"),
        (["evaluate", "runs/one", "data.eval=null"], "data.eval: expected an evaluation set, got null"),
        (["evaluate", "runs/one", "data.evil=null"], "unknown key 'data.evil'"),
        (["evaluate", "runs/one", "fast"], "argument 'fast': expected key.path=value"),
        (["evaluate", "runs/one", "run.seed=1", "run.seed=2"], "expected each key once"),
        (
            ["evaluate", "runs/one", "rollout.engine=sglang", "rollout.sglang.urls=[http://127.0.0.1:1]"],
            "rollout.sglang.urls: expected none here",
        ),
        (["evaluate", "x" * 300], "File name too long"),
        (["evaluate", "runs/one", "--output", "runs/one/config.yaml"], "'--output': expected an empty or a new folder"),
        (["export", "runs/one", "--to", "."], "'--to': expected a new folder, got the current one"),
        (["generate", "runs/one"], "--output"),
        (["generate", "runs/one", "--output", "a.csv", "--num-prompts", "0"], "'--num-prompts': expected at least 1"),
        (["export", "runs/one"], "--to"),
        (["export", "runs/one", "--to", "runs"], "'--to': expected an empty or a new folder, got runs"),
        (["export", "runs/one", "--to", "out", "--step", "4"], "expected a step with a checkpoint (2, 10), got 4"),
    ],
)
def test_a_wrong_argument_is_a_line(
    words: list[str], expected: str, run_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(words, capfd)
    assert sorted(path.name for path in Path().iterdir()) == ["runs"]


def test_a_run_without_a_checkpoint_is_refused(run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run_folder / "checkpoints").rename(run_folder / "elsewhere")
    assert "expected a run with a checkpoint, got none" in refusal(["export", str(run_folder), "--to", "out"], capfd)


def test_a_damaged_checkpoint_is_not_exported(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "is_whole", checkpoint.is_whole)
    assert "a file is missing or damaged" in refusal(["export", str(run_folder), "--to", "out"], capfd)
    assert not Path("out").exists()


def test_a_full_disk_leaves_no_part_of_an_export(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export.shutil, "copyfile", full)
    assert "'--to': out cannot be written: No space left" in refusal(["export", "runs/one", "--to", "out"], capfd)
    assert sorted(path.name for path in Path().iterdir()) == ["runs"]


def test_a_hub_that_refuses_leaves_the_export(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("401: who are you?\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    assert main(["export", "runs/one", "--to", "out", "--push", "me/it"]) == 2
    assert "the hub refuses me/it, or cannot be reached: 401: who are you?; out is complete" in capfd.readouterr().err
    assert (Path("out") / "config.json").is_file()


def test_the_model_card_has_the_evaluations_up_to_its_step(run_folder: Path, eval_record: EvalRecord) -> None:
    import msgspec

    metrics = MetricsFile(run_folder / "metrics.jsonl")
    for version, accuracy in ((0, 0.25), (10, 0.5), (20, 0.75)):
        metrics.append(msgspec.structs.replace(eval_record, policy_version=version, accuracy=accuracy, reward=accuracy))
    metrics.close()
    export.export(run_folder, 10, Path("out"))
    card = (Path("out") / "README.md").read_text()
    assert "before training (version 0)" in card
    assert "- version 10: " in card
    assert "0.750" not in card


@pytest.mark.parametrize("name", ["made.jsonl", "made.parquet"])
def test_a_disk_that_refuses_the_end_of_a_file_is_told(name: str, tmp_path: Path) -> None:
    """A parquet file without an end is of no use, and is removed."""
    path = tmp_path / name
    file = _opened(path)
    file.write(ROW)
    closed = file.close

    def full() -> None:
        closed()
        raise OSError(errno.ENOSPC, "No space left on device")

    file.close = full  # type: ignore[method-assign]
    with pytest.raises(PreflightError, match="cannot be written: No space left on device"):
        _close(file, path, whole=True)
    assert not path.exists()


def test_a_row_that_does_not_fit_leaves_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    code = f"""
import resource
from pathlib import Path
from areal_rloo.stages import generate
row = generate.Row("sums", 3, 1, "1+1=", [5, 6], "2", [7], [-0.5], [], 4, 1.0, {{}}, "stop", None)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
file = generate._opened(Path({str(path)!r}))
try:
    for _ in range(100):
        file.write(row)
except OSError as error:
    print(error.strerror)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "File too large\n"
    assert [json.loads(line)["completion"] for line in path.read_text().splitlines()]


def test_an_empty_file_of_a_refused_start_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    _close(_opened(path), path, whole=False)
    assert not path.exists()


@pytest.mark.parametrize("name", ["made.jsonl", "made.parquet"])
def test_rows_come_back_from_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    file = _opened(path)
    for _ in range(3):
        file.write(ROW)
    file.close()
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        rows = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
        for row in rows:
            row["reward_parts"] = dict(row["reward_parts"])
    assert rows == [{name: getattr(ROW, name) for name in Row.__struct_fields__}] * 3
