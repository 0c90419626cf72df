"""The checks before a start, and the command of the doctor."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.situations import REPO, config

from areal_rloo.errors import ModelError, PreflightError, UserError
from areal_rloo.launcher import start
from areal_rloo.launcher.doctor import Finding, Situation, findings, guarded
from areal_rloo.launcher.doctor.addresses import check_servers
from areal_rloo.waiting import call_within


def test_a_check_that_raises_is_unsure() -> None:
    def check_the_moon(situation: Situation) -> Iterator[Finding]:
        raise ZeroDivisionError("new moon")
        yield

    (finding,) = guarded(check_the_moon, Situation())
    assert (finding.name, finding.state) == ("the moon", "unsure")
    assert finding.what == "could not be checked: ZeroDivisionError: new moon"


def test_a_hung_call_times_out_and_an_error_is_raised() -> None:
    with pytest.raises(TimeoutError):
        call_within(0.01, threading.Event().wait)
    with pytest.raises(ZeroDivisionError):
        call_within(10.0, lambda: 1 // 0)
    assert call_within(10.0, lambda: 7) == 7


def test_a_start_ends_with_the_first_wrong_finding(tmp_path: Path) -> None:
    start.check(config())
    for overrides, error in ((("model.path=/nowhere/x",), ModelError), (("data.train.task=gsm8x",), UserError)):
        with pytest.raises(error):
            start.check(config(*overrides))
    with pytest.raises(
        PreflightError, match=r"run\.folder: .* expected launcher\.min_free_disk_bytes=1000000000000000"
    ):
        start.look(config("launcher.min_free_disk_bytes=1000000000000000"), tmp_path / "run")
    start.look(config(), tmp_path / "run")
    assert (tmp_path / "run" / "logs" / "launcher.log").exists()


def test_a_start_says_how_a_run_goes_on_without_a_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        start.look(config(f"data.train.rewards=[{{url: {dead}/score}}]"), tmp_path)
        said = capfd.readouterr().err
        assert "a run drops each completion without a reward, and ends above" in said and "waits" not in said
        (finding,) = check_servers(Situation(config("rollout.engine=sglang", f"rollout.sglang.urls=[{dead}]")))
        assert finding.what.endswith("a run waits, and ends after rollout.sglang.start_timeout_s=600 s")


def test_a_login_node_skips_the_checks_of_its_own_devices(tmp_path: Path) -> None:
    names = {f.name for f in findings(config("wire.port=1"), folder=None, thorough=False, runs_here=False)}
    assert not names & {"wire.port", "gpus", "shared memory", "open files", "memory"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = config(f"wire.port={taken.getsockname()[1]}")
        start.look(busy, tmp_path, runs_here=False)
        with pytest.raises(PreflightError, match="is in use"):
            start.look(busy, tmp_path)


def test_the_quick_checks_do_not_import_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from areal_rloo.config import load_config
from areal_rloo.launcher import doctor
from areal_rloo.launcher.doctor import findings
print(len(list(findings(load_config("quickstart.yaml"), folder=Path({str(tmp_path)!r}), thorough=False))) > 10)
print("torch" in sys.modules, "transformers" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


def _doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_rloo.launcher.doctor", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, env=environment)


def test_the_command_exits_with_0_without_a_wrong_finding(tmp_path: Path) -> None:
    done = _doctor("--config", "quickstart.yaml", "--quick", f"run.folder={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert all(line.startswith(("ok      ", "unsure  ", "        fix: ")) for line in lines)
    assert " ok, 0 wrong, " in last
    assert not (tmp_path / "run").exists()


def test_the_command_exits_with_2_and_prints_the_fix(tmp_path: Path) -> None:
    done = _doctor("--config", "quickstart.yaml", "--quick", "model.path=/nowhere/model", f"run.folder={tmp_path}")
    assert (done.returncode, done.stderr) == (2, "")
    lines = done.stdout.splitlines()
    at = lines.index("wrong   model.path: /nowhere/model: no such folder")
    assert lines[at + 1] == "        fix: expected a model folder, a hub name (org/name), or tiny"
    assert ", 1 wrong, " in lines[-1]


def test_the_command_says_which_start_would_be_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"num_train_steps": 1}')
    done = _doctor("--config", "quickstart.yaml", "--quick", f"run.folder={tmp_path}", "launcher.num_hosts=2")
    assert done.stdout.splitlines()[:4] == [
        f"unsure  run.folder: a start without --resume would be refused: {tmp_path} holds a run already",
        "        fix: add --resume to go on with it, or choose another",
        "unsure  launcher.num_hosts: a start with the local launcher would be refused: expected 1 with the local "
        "launcher, got 2",
        "        fix: start it with areal_rloo.launcher.ray or areal_rloo.launcher.slurm",
    ]


def test_json_output_is_a_single_object(tmp_path: Path) -> None:
    done = _doctor("--config", "quickstart.yaml", "--json", "model.path=/nowhere", f"run.folder={tmp_path}")
    said = json.loads(done.stdout)
    assert done.returncode == 2
    assert said["counts"]["wrong"] == 1
    assert {"name", "state", "what", "fix"} == set(said["findings"][0])
    assert {"torch", "host name"} <= {finding["name"] for finding in said["findings"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quick", "--config", "nope.yaml"], "nope.yaml: no such config file"),
        (["--quick", "--config", "quickstart.yaml", "run.nane=x"], "did you mean 'run.name'?"),
        (["--quick", "--config", "quickstart.yaml", "run.entry=no.py"], "run.entry: no.py cannot be imported"),
        (["--quick", "run.name=x"], "argument 'run.name=x'"),
        (["--quick", "--fast"], "argument '--fast'"),
    ],
)
def test_a_mistake_on_the_command_line_is_a_finding(arguments: list[str], words: str) -> None:
    done = _doctor(*arguments)
    assert (done.returncode, done.stderr) == (2, "")
    assert words in done.stdout
