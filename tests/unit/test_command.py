"""The command `areal-rloo`: every program is found and explains itself, and mistakes are a line with exit code 2."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_rloo import __main__ as command
from areal_rloo import __version__
from areal_rloo.completion import candidates
from areal_rloo.config import load_config
from areal_rloo.errors import ConfigError
from areal_rloo.launcher import local, resume, run
from areal_rloo.launcher.placement import Host
from areal_rloo.launcher.run_folder import write_beginning
from areal_rloo.telemetry.code_state import STARTS_NAME

HOST = Host("here", "127.0.0.1", 2, ())


@pytest.mark.parametrize("name", sorted(set(command.PROGRAMS) - {"quickstart"}))
def test_a_program_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: areal-rloo {name}")
    assert len(text) > 150


def test_the_quickstart_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["quickstart", "--help"]) == 0
    assert "areal-rloo quickstart learner.num_train_steps=6" in capsys.readouterr().out
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_the_list_of_programs_has_each_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == command.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in command.PROGRAMS)
    assert "areal-rloo run --launcher slurm" in text


@pytest.mark.parametrize(("name", "hint"), [("evalute", "did you mean 'evaluate'?"), ("x\n", "expected one of")])
def test_an_unknown_program_is_a_line_with_a_hint(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([name]) == 2
    text = capsys.readouterr().err
    assert hint in text
    assert text.count("\n") == 1


def test_a_mistake_in_a_program_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["report", "no-such-folder"]) == 2
    assert command.main(["config", "show", "algorithm.group_sise"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: no-such-folder: no run here")
    assert second.endswith("did you mean 'algorithm.group_size'?")


def test_the_console_script_and_the_module_are_the_same() -> None:
    script = Path(sys.executable).with_name("areal-rloo")
    assert script.is_file(), "the package is installed with its script"
    for words in ([str(script)], [sys.executable, "-m", "areal_rloo"]):
        ended = subprocess.run([*words, "config", "show", "run.seed"], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.startswith("run.seed: integer from 0; default 0\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["config", "show"]])
def test_a_full_disk_behind_the_output_is_a_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "areal_rloo", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (2, "error: standard output: No space left on device\n")


def test_a_closed_reader_is_no_error() -> None:
    command = f"{sys.executable} -m areal_rloo config show | head -1"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def called(monkeypatch: pytest.MonkeyPatch, launcher: str) -> list[list[str]]:
    """Replace the main function of a launcher; return the list that gets the arguments of each call."""
    calls: list[list[str]] = []
    module = importlib.import_module(run.LAUNCHERS[launcher])
    monkeypatch.setattr(module, "main", lambda arguments: calls.append(list(arguments)) or 7)
    return calls


def test_run_calls_the_launcher_with_the_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = called(monkeypatch, "slurm")
    assert command.main(["run", "--config", "a.yaml", "--launcher", "slurm", "--wait", "run.seed=1"]) == 7
    assert command.main(["run", "--launcher=slurm", "--config", "a.yaml"]) == 7
    assert calls == [["--config", "a.yaml", "--wait", "run.seed=1"], ["--config", "a.yaml"]]
    here = called(monkeypatch, "local")
    assert command.main(["quickstart", "--dry-run"]) == 7
    assert here == [["--config", "quickstart.yaml", "--dry-run"]]


@pytest.mark.parametrize("words", [["--launcher"], ["--launcher", "pbs"], ["--launcher", "ray", "--launcher=ray"]])
def test_an_unknown_launcher_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"argument '--launcher': expected one of local, slurm, ray, got"):
        run.launcher_of(words)


def test_resume_repeats_the_launcher_of_the_last_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    for launcher in ("local", "ray"):
        write_beginning(folder, load_config("quickstart.yaml"), [HOST], launcher)
    calls = called(monkeypatch, "ray")
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(folder / "config.yaml"), f'run.folder="{folder}"', "--resume"]
    assert resume.main([str(folder), "run.seed=1", "--dry-run"]) == 7
    assert resume.main(["run.seed=1"]) == 7  # runs/latest
    assert calls == [[*words, "run.seed=1", "--dry-run"], [*words, "run.seed=1"]]
    here = called(monkeypatch, "local")
    assert resume.main([str(folder), "--launcher", "local"]) == 7
    assert here == [words]


def test_resume_of_a_submitted_run_submits_its_last_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("submitted-20260102-000000-1.yaml", "submitted-20260101-000000-9.yaml"):
        (tmp_path / name).write_text("{}")
    calls = called(monkeypatch, "slurm")
    assert resume.main([str(tmp_path)]) == 7
    newest = tmp_path / "submitted-20260102-000000-1.yaml"
    assert calls == [["--config", str(newest), f'run.folder="{tmp_path}"', "--resume"]]


@pytest.mark.parametrize("name", ["exp #2", "a: b", "[x]", "a=b", "'q'", 'q"'])
def test_resume_takes_the_folder_whatever_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / name
    folder.mkdir()
    write_beginning(folder, load_config("quickstart.yaml"), [HOST])
    calls = called(monkeypatch, "local")
    monkeypatch.chdir(tmp_path)
    assert resume.main([name]) == 7
    assert load_config("quickstart.yaml", [calls[0][2]]).run.folder == str(folder)


def test_resume_without_a_recorded_launcher_asks_for_it(tmp_path: Path) -> None:
    write_beginning(tmp_path, load_config("quickstart.yaml"), [HOST])
    (tmp_path / STARTS_NAME).write_text(json.dumps({"launcher": "pbs"}))
    with pytest.raises(ConfigError, match=r"names no launcher; say --launcher with one of local, slurm, ray"):
        resume.main([str(tmp_path)])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["re"], ["replay", "report", "resume"]),
        (["run", "--config", "gsm8k_rloo_a"], ["gsm8k_rloo_areal.yaml"]),
        (["run", "--launcher", ""], ["local", "ray", "slurm"]),
        (["run", "algorithm.max_st"], ["algorithm.max_staleness="]),
        (["run", "algorithm.stale_tokens", "="], ["drop", "mask", "wait"]),
        (["run", "algorithm.stale_tokens", "=", "m"], ["mask"]),
        (["run", "learner.compile", "=", ""], ["false", "true"]),
        (["run", ""], []),
        (["config", "s"], ["schema", "show"]),
        (["config", "show", "wire.hea"], ["wire.heartbeat_s", "wire.heartbeat_timeout_s"]),
        (["completion", ""], ["bash", "zsh"]),
        (["inspect", "ru"], []),
        (["=", "x"], []),
    ],
)
def test_a_shell_completes_words(words: list[str], expected: list[str]) -> None:
    assert candidates(words) == expected


@pytest.mark.parametrize("name", sorted(set(command.PROGRAMS) - {"quickstart"}))
def test_a_shell_completes_the_flags_of_a_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([name, "--help"])
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))
    assert "--help" in (found := candidates([name, "--"]))
    assert set(found) <= told
    assert capsys.readouterr().out == "", "and the program does not run"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_of_bash_completes_a_key(tmp_path: Path) -> None:
    script = f"""PATH={Path(sys.executable).parent}:$PATH; cd {tmp_path}
    eval "$(areal-rloo completion bash)"
    COMP_WORDS=(areal-rloo run algorithm.pres); COMP_CWORD=2
    compopt() {{ :; }}; _areal_rloo; echo "${{COMPREPLY[@]}}\""""
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("algorithm.preset=\n", "")


def test_every_launcher_is_named_in_the_help_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        local.main(["--help"])
    assert "--launcher" in capsys.readouterr().out
