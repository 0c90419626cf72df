"""A resume by other code says so: by the files, whatever the version and the checkout say."""

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from areal_rloo.config import load_config
from areal_rloo.launcher.placement import Host
from areal_rloo.launcher.run_folder import write_beginning
from areal_rloo.telemetry.code_state import changed_code, code_state

HOST = Host("here", "127.0.0.1", 2, (), 2**34)


def _package(folder: Path) -> Path:
    (folder / "part").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part" / "code.py").write_text("x = 1\n")
    return folder


def test_the_digest_is_of_the_names_and_texts_of_all_files(tmp_path: Path) -> None:
    package = _package(tmp_path / "package")
    states = [code_state(package)]
    (package / "part" / "code.py").write_text("x = 2\n")
    states.append(code_state(package))
    (package / "part" / "code.py").rename(package / "part" / "other.py")
    states.append(code_state(package))
    assert len({state.digest for state in states}) == 3
    assert code_state(package) == states[-1]
    assert states[-1].commit is None


def test_what_is_no_module_does_not_count(tmp_path: Path) -> None:
    """The lock of an editor is a link to nowhere; a folder may have any name."""
    package = _package(tmp_path / "package")
    before = code_state(package)
    (package / "part" / ".#code.py").symlink_to("user@host.1234")
    (package / "part" / "folder.py").mkdir()
    (package / "part" / "gone.py").symlink_to("nothing.py")
    assert code_state(package) == before


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed here")
def test_the_commit_is_that_of_the_checkout_of_the_package(tmp_path: Path) -> None:
    package = _package(tmp_path / "repo" / "package")
    git = ["git", "-C", str(tmp_path / "repo"), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    commit = code_state(package).commit
    assert commit is not None and head.startswith(commit)


def test_a_start_says_nothing_of_code_that_is_the_same(tmp_path: Path) -> None:
    config = load_config("quickstart.yaml")
    assert [write_beginning(tmp_path, config, [HOST]) for _ in range(2)] == [[], []]


def test_other_code_is_said_with_both_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, now = load_config("quickstart.yaml"), code_state()
    write_beginning(tmp_path, config, [HOST])
    other = msgspec.structs.replace(now, version="9.9", digest="0123456789ab")
    monkeypatch.setattr("areal_rloo.launcher.run_folder.code_state", lambda: other)
    assert write_beginning(tmp_path, config, [HOST]) == [
        f"resume: the code of areal_rloo has changed: {now} -> {other}"
    ]
    assert write_beginning(tmp_path, config, [HOST]) == []


@pytest.mark.parametrize("line", [b'{"packages": {"areal-rloo": "0.1"}}\n', b"cut"])
def test_a_start_without_a_record_of_the_code_was_another_version(line: bytes) -> None:
    now = code_state()
    assert changed_code(line, now) == f"resume: an earlier version of areal_rloo began this run; now {now}"
