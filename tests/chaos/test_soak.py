"""The verdict of a soak finds damage that a test makes, and a killed soak says that the verdict is missing."""

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos import sockets
from chaos.verdict import judge, left_files, left_processes
from support.local_runs import Run
from support.processes import command_of

from areal_rloo.telemetry.trajectories import FILE_NAME

SOAK = Path(__file__).with_name("soak.py")
GROUP_SIZE = 4

Line = dict[str, Any]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_killed_soak_has_a_last_line_without_a_verdict(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), "--minutes=5", "--seed=7", "--calm", f"--work={tmp_path / 'soak'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as soak:
        assert soak.stdout is not None
        if not soak.stdout.readline().startswith("seed 7: SEED=7 repeats the faults"):
            pytest.skip("no namespaces of one's own here, which a soak needs")
        children = psutil.Process(soak.pid).children(recursive=True)
        for process in children:
            if command_of(process)[:2] == [sys.executable, str(SOAK)]:
                process.kill()
        rest, _ = soak.communicate(timeout=120)
    assert rest.splitlines()[-1].startswith("seed 7: NO VERDICT, the soak ended with code 137")
    assert soak.returncode == 1
    assert [process for process in children if process.is_running()] == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three epochs, with every trained trajectory recorded."""
    folder = tmp_path_factory.mktemp("soak") / "run"
    records = ("telemetry.trajectories_per_step=1000000", "data.train.num_prompts=6", "wire.heartbeat_timeout_s=60")
    code, output = Run(folder, *records).wait()
    assert code == 0, output
    return folder


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def _edit(path: Path, change: Callable[[list[Line]], list[Line]]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))


def _set(line: Line, **values: Any) -> Line:
    return {**line, **values}


def test_a_run_without_faults_is_clean(run_folder: Path) -> None:
    verdict = judge(run_folder)
    assert verdict.is_clean, verdict.findings
    assert str(verdict) == "0 samples lost, 0 samples trained twice, 0 tokens trained past the bound, 0 orphans"


def test_an_unbalanced_line_is_found(run_folder: Path) -> None:
    def lose(lines: list[Line]) -> list[Line]:
        steps = [line for line in lines if line["kind"] == "train"]
        steps[2]["ledger"]["in_flight"] -= 2
        return lines

    _edit(run_folder / "metrics.jsonl", lose)
    verdict = judge(run_folder)
    assert (verdict.num_lost, verdict.num_doubled) == (2, 0)
    assert "step 3: the ledger is unbalanced" in verdict.findings[0]


def test_a_repeated_step_is_found(run_folder: Path) -> None:
    _edit(run_folder / "metrics.jsonl", lambda lines: [*lines, next(x for x in lines if x["kind"] == "train")])
    assert judge(run_folder).findings == ["metrics.jsonl: step 1 after step 5"]


def test_tokens_past_the_bound_are_found_in_a_step(run_folder: Path) -> None:
    def age(lines: list[Line]) -> list[Line]:
        steps = [line for line in lines if line["kind"] == "train"]
        steps[-1]["staleness_tokens"]["2"] = 7
        return lines

    _edit(run_folder / "metrics.jsonl", age)
    assert judge(run_folder).num_past_bound == 7


def test_tokens_past_the_bound_are_found_in_a_trajectory(run_folder: Path) -> None:
    def age(lines: list[Line]) -> list[Line]:
        place = max(index for index, line in enumerate(lines) if line.get("dropped") is None)
        last = lines[place]
        lines[place] = _set(last, versions=[[last["policy_version"] - 2, len(last["token_ids"])]])
        return lines

    _edit(run_folder / FILE_NAME, age)
    assert judge(run_folder).num_past_bound > 0


def test_a_sample_trained_twice_is_found(run_folder: Path) -> None:
    _edit(run_folder / FILE_NAME, lambda lines: [*lines, lines[0]])
    assert judge(run_folder).num_doubled == 1


def test_a_sample_both_trained_and_dropped_is_found(run_folder: Path) -> None:
    _edit(run_folder / FILE_NAME, lambda lines: [*lines, _set(lines[0], dropped="stale")])
    assert judge(run_folder).num_doubled == 1


def test_a_sample_without_an_outcome_is_found(run_folder: Path) -> None:
    _edit(run_folder / FILE_NAME, lambda lines: lines[1:])
    verdict = judge(run_folder)
    assert verdict.num_lost == 1
    assert "samples without an outcome: [(" in verdict.findings[0]


def test_a_prompt_trained_twice_in_an_epoch_is_found(run_folder: Path) -> None:
    """So is the prompt whose place the repeated prompt takes."""

    def repeat(lines: list[Line]) -> list[Line]:
        first, other = (
            line for line in lines if line["sample_index"] == 0 and line["epoch"] == 0 and lines.index(line) < 8
        )
        wrong = other["group_id"]
        return [_set(x, item_index=first["item_index"]) if x["group_id"] == wrong else x for x in lines]

    _edit(run_folder / FILE_NAME, repeat)
    verdict = judge(run_folder)
    assert (verdict.num_doubled, verdict.num_lost) == (1, 1)
    assert any("prompts skipped" in finding for finding in verdict.findings)


@pytest.mark.parametrize(("reason", "num_doubled"), [("stale", 0), ("reward_crash", 1)])
def test_only_the_prompt_of_a_stale_group_may_come_again(run_folder: Path, reason: str, num_doubled: int) -> None:
    def drop(lines: list[Line]) -> list[Line]:
        group = [line for line in lines if line["group_id"] == lines[0]["group_id"]]
        return [*lines, *(_set(line, group_id=10**6, dropped=reason) for line in group)]

    _edit(run_folder / FILE_NAME, drop)
    verdict = judge(run_folder)
    assert verdict.num_doubled == num_doubled, verdict.findings


def test_a_process_left_over_is_found() -> None:
    known = {process.pid for process in psutil.process_iter()}
    command = [sys.executable, "-c", "print(flush=True); input()", "a-word"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        left.stdout.readline()
        among = [psutil.Process(), psutil.Process(left.pid)]
        (found,) = left_processes(known - {left.pid}, among)
        assert "a-word" in found
        left.kill()
    assert left_processes(known, among) == []


def test_files_left_over_are_found(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"
    (memory / "torchinductor_root").mkdir(parents=True)
    assert left_files(run_folder, [memory]) == []
    (memory / "areal_rloo-segments-x").mkdir()
    (run_folder / "checkpoints" / ".unfinished-step-000009").mkdir()
    (run_folder / ".config.yaml.unfinished").touch()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(run_folder)  # the name of a socket may have 107 characters
        server.bind("left.sock")
    assert len(left_files(run_folder, [memory])) == 4


@pytest.fixture
def echo() -> Iterator[tuple[int, socket.socket]]:
    """A process that answers every byte with a byte: its id, and a connection."""
    code = (
        "import socket, sys\n"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "while data := s.recv(1): s.sendall(data)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", code, str(server.getsockname()[1])]
        with subprocess.Popen(command) as child:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(30)
                yield child.pid, connection
            child.send_signal(signal.SIGKILL)


def test_a_silent_connection_loses_no_byte(echo: tuple[int, socket.socket]) -> None:
    pid, connection = echo
    try:
        (theirs,) = sockets.connections(pid, connection.getsockname()[1])
        with theirs:
            sockets.silence(theirs)
            connection.sendall(b"1")
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            sockets.let_through(theirs)
    except (PermissionError, ValueError):
        pytest.skip("no sockets of other processes can be borrowed here")
    connection.settimeout(60)
    assert connection.recv(1) == b"1"
