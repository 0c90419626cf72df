"""The files that tell Prometheus where the processes of a run serve their metrics."""

import json
import socket
from pathlib import Path

import pytest

from areal_rloo.config import load_config
from areal_rloo.telemetry.targets import Targets


def _targets(folder: Path, run: Path, *options: str) -> Targets:
    return Targets(load_config("quickstart.yaml", [f"telemetry.targets_folder={folder}", *options]), run)


@pytest.mark.parametrize(
    ("host", "target"),
    [("127.0.0.1", "127.0.0.1:9400"), ("::1", "[::1]:9400"), ("0.0.0.0", "10.1.2.3:9400"), ("::", "10.1.2.3:9400")],
)
def test_a_process_is_found_at_its_address_with_run_and_name(
    host: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    _targets(tmp_path / "targets", tmp_path / "gsm8k", f"telemetry.metrics_host='{host}'").add("rollout-0", 9400)
    (path,) = (tmp_path / "targets").iterdir()
    assert path.name.startswith("gsm8k-")
    assert path.name.endswith(".rollout-0.json")
    labels = {"run": "gsm8k", "run_id": path.name.partition("-")[2].partition(".")[0], "process": "rollout-0"}
    assert json.loads(path.read_text()) == [{"targets": [target], "labels": labels}]


def test_a_name_too_long_for_a_name_server_is_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    _targets(tmp_path / "targets", tmp_path / "run", "telemetry.metrics_host=0.0.0.0").add("learner", 9400)
    (path,) = (tmp_path / "targets").iterdir()
    assert json.loads(path.read_text())[0]["targets"] == [f"{'h' * 64}:9400"]


@pytest.mark.parametrize("address", ["127.0.1.1", None])
def test_a_host_without_an_address_has_its_name(
    address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(name: str) -> str:
        if address is None:
            raise socket.gaierror("no name server")
        return address

    monkeypatch.setattr(socket, "gethostbyname", known)
    _targets(tmp_path / "targets", tmp_path / "run", "telemetry.metrics_host=0.0.0.0").add("learner", 9400)
    (path,) = (tmp_path / "targets").iterdir()
    assert json.loads(path.read_text())[0]["targets"] == [f"{socket.gethostname()}:9400"]


def test_a_process_that_comes_again_replaces_its_file(tmp_path: Path) -> None:
    targets = _targets(tmp_path / "targets", tmp_path / "run")
    for port in (9400, 9500):
        targets.add("learner", port)
    (path,) = (tmp_path / "targets").iterdir()
    assert json.loads(path.read_text())[0]["targets"] == ["127.0.0.1:9500"]


@pytest.mark.parametrize("name", ["run", "a[b]*?"])
def test_a_run_removes_its_own_files_alone(name: str, tmp_path: Path) -> None:
    """Runs in other folders may have the same name, and names may look like patterns."""
    folder = tmp_path / "targets"
    own, other = _targets(folder, tmp_path / "one" / name), _targets(folder, tmp_path / "two" / name)
    for process in ("learner", "rollout-0", "rollout-1"):
        own.add(process, 1)
        other.add(process, 2)
    own.remove("rollout-1")
    assert len(list(folder.iterdir())) == 5
    own.remove("rollout-1")  # gone already
    own.remove()
    assert {json.loads(path.read_text())[0]["targets"][0] for path in folder.iterdir()} == {"127.0.0.1:2"}
    assert len(list(folder.iterdir())) == 3


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    targets = _targets(tmp_path / "file" / "targets", tmp_path / "run")
    targets.add("learner", 9400)
    targets.remove()
    assert (tmp_path / "file").read_text() == ""


def test_without_a_folder_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    targets = Targets(load_config("quickstart.yaml", ["telemetry.targets_folder=null"]), tmp_path / "run")
    targets.add("learner", 9400)
    targets.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, here, there = tmp_path / "run", tmp_path / "here", tmp_path / "there"
    for folder in (run, here, there):
        folder.mkdir()
    config = load_config("quickstart.yaml", ["telemetry.targets_folder=targets"])
    monkeypatch.chdir(here)
    Targets(config, run).begin()
    Targets(config, run).add("learner", 9400)  # and crashes
    monkeypatch.chdir(there)
    assert [target.process for target in Targets(config, run).read()] == ["learner"], "as `areal-rloo top` reads them"
    Targets(config, run).begin()
    assert list((here / "targets").iterdir()) == []
    Targets(config, run).add("learner", 9500)
    assert len(list((here / "targets").iterdir())) == 1, "where a Prometheus looks"
    moved = load_config("quickstart.yaml", [f"telemetry.targets_folder={there / 'targets'}"])
    Targets(moved, run).begin()
    assert list((here / "targets").iterdir()) == []
    Targets(moved, run).add("learner", 9600)
    assert len(list((there / "targets").iterdir())) == 1


def test_a_run_folder_that_takes_no_link_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    targets = _targets(tmp_path / "targets", tmp_path / "no such folder" / "run")
    targets.begin()
    targets.add("learner", 9400)
    assert "cannot be made" in caplog.text
    assert len(list((tmp_path / "targets").iterdir())) == 1


def test_a_working_folder_that_was_removed_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout may be made again while a run goes on; the learner, each restart and the end of the run come here."""
    run, config = tmp_path / "run", load_config("quickstart.yaml")
    run.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Targets(config, run).begin()
    (tmp_path / "work").rmdir()
    assert Targets(config, run).read() == []
    Targets(config, run).remove()
    (run / "targets").unlink()
    assert Targets(config, run).read() == []


def test_a_link_that_a_start_replaces_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    targets = _targets(tmp_path / "targets", run)
    targets.begin()
    targets.add("learner", 9400)
    is_symlink = Path.is_symlink

    def replaced(path: Path) -> bool:
        found = is_symlink(path)
        path.unlink()
        return found

    monkeypatch.setattr(Path, "is_symlink", replaced)
    assert [one.process for one in _targets(tmp_path / "targets", run).read()] == ["learner"]


def test_targets_may_be_in_the_run_folder_itself(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for _ in range(2):
        targets = _targets(run / "targets", run)
        targets.begin()
        targets.add("learner", 9400)
        assert [one.process for one in _targets(run / "targets", run).read()] == ["learner"]


def test_a_file_of_the_user_with_the_name_of_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "targets").write_text("notes")
    _targets(tmp_path / "targets", tmp_path / "run").begin()
    assert (tmp_path / "run" / "targets").read_text() == "notes"
