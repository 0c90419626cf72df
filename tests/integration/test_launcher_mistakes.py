"""Messages of the local launcher before the start: mistakes in a config, and the plan."""

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.patience import eventually
from support.wrong_configs import BY_HAND

REPO = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "nope.yaml"], "nope.yaml: no such config file"),
        (["--config", "quickstart.yaml", "algorithm.group_sise=3"], "did you mean 'algorithm.group_size'?"),
        (
            ["--config", "quickstart.yaml", "rollout.num_workers=many"],
            "rollout.num_workers: expected auto, or a number",
        ),
        (["--config", "quickstart.yaml", "algorithm.group_size=1"], "algorithm.group_size: expected at least 2"),
        (["--config", "quickstart.yaml", "model.path=/nowhere/model"], "model.path: /nowhere/model: no such folder"),
        (["--config", "quickstart.yaml", "learner.device=cuda"], "learner.device=cuda needs one GPU of 8 GB or more"),
        (["--config", "quickstart.yaml", "--fast"], "argument '--fast'"),
        (
            ["--config", "quickstart.yaml", "learner.gradient_checkpointing=yes"],
            "one of auto, true, false; the value is",
        ),
        (["--config", "quickstart.yaml", "learner.lora.targets=[qkv_proj]"], "down_proj, gate_proj, k_proj"),
        (
            ["--config", "gsm8k_rloo.yaml", "rollout.sglang.python=/nowhere/python"],
            "rollout.sglang.python: expected a Python that has sglang, found none at /nowhere/python",
        ),
        (
            ["--config", "quickstart.yaml", "rollout.engine=sglang", "rollout.sglang.urls=[http://a:1, http://b:1]"],
            "rollout.sglang.urls: expected one for each of rollout.num_workers=1, got 2",
        ),
        (
            [
                *("--config", "quickstart.yaml", "rollout.engine=sglang", "rollout.sglang.urls=[http://127.0.0.1:1]"),
                "rollout.sglang.api_key_env=AREAL_RLOO_NO_SUCH_KEY",
            ],
            "rollout.sglang.api_key_env: expected the servers' key in the environment variable AREAL_RLOO_NO_SUCH_KEY",
        ),
        (
            ["--config", "quickstart.yaml", "rollout.engine=sglang", "rollout.sglang.arguments.port=1"],
            "rollout.sglang.arguments.port: not an option here: the worker takes a free port",
        ),
        (
            ["--config", "quickstart.yaml", "rollout.tensor_parallel=2"],
            "rollout.tensor_parallel: expected 1 with rollout.engine=embedded, got 2",
        ),
        (
            ["--config", "gsm8k_rloo.yaml", "rollout.engine=embedded", "data.train.path=no.jsonl", "data.eval=null"],
            "no.jsonl",
        ),
        (
            ["--config", "quickstart.yaml", "algorithm.group_filter=no.py:keep"],
            "algorithm.group_filter: no.py cannot be imported",
        ),
        (
            ["--config", "quickstart.yaml", "algorithm.preset=rlo"],
            "algorithm.preset: expected one of rloo, reinforce, grpo",
        ),
        (["--config", "quickstart.yaml", "run.folder=/proc/run"], "run.folder: /proc/run cannot be written"),
        (["--config", "quickstart.yaml", "run.folder=/nowhere", "--resume"], "holds no run"),
    ],
)
def test_a_mistake_prints_one_line_and_exits_with_2(arguments: list[str], words: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "areal_rloo.launcher.local", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 2
    *notes, error = ended.stderr.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert [note.startswith("no GPU on ") for note in notes] == [True] * len(notes)
    assert len(notes) <= ("gsm8k_rloo.yaml" in arguments), "only a config for GPUs names the GPU first"
    assert ended.stdout == ""


def _launch(folder: Path, *arguments: str, before: tuple[str, ...] = (), **environment: str) -> str:
    """Run the command in an empty folder; give its single line on standard error, after a look for leftovers."""
    ended = subprocess.run(
        [*before, sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended
    assert ended.stderr.startswith("error: ")
    assert list(folder.iterdir()) == []
    return ended.stderr


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["start", "dry-run"])
@pytest.mark.parametrize(("overrides", "words"), BY_HAND[::5])
def test_a_wrong_config_leaves_nothing_behind(tmp_path: Path, overrides: str, words: str, more: list[str]) -> None:
    assert words in _launch(tmp_path, *overrides.split(" & "), *more)


@pytest.mark.parametrize("launcher", ["local", "ray", "slurm"])
def test_ctrl_c_during_the_imports_gives_one_line(tmp_path: Path, launcher: str) -> None:
    imports = tmp_path / "imports"
    (tmp_path / "yaml.py").write_text(
        f"import pathlib, time\npathlib.Path({str(imports)!r}).touch()\ntime.sleep(600)\n"
    )
    as_in_a_shell = ("env", "--default-signal=INT")  # these tests may run in the background of a script
    run = subprocess.Popen(
        [*as_in_a_shell, sys.executable, "-m", f"areal_rloo.launcher.{launcher}", "--config", "quickstart.yaml"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"},
    )
    eventually(imports.exists, "yaml is not imported")
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert (run.returncode, said) == (130, "stopped before anything had started\n")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_shared_memory_too_small_for_the_weights_is_refused(tmp_path: Path) -> None:
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    line = _launch(tmp_path, before=("unshare", "--mount", "sh", "-c", small, "sh"))
    assert "shared memory: /dev/shm has 1 MiB of 1 MiB free; two versions of the weights take 2.931 MiB" in line


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts=8 in config.json, a mixture of experts"),
        ({"model_type": "mamba", "hidden_size": 64}, "config.json does not give every size of a decoder-only model"),
        ({"model_type": None}, "has no model_type in config.json"),
    ],
)
def test_a_family_that_cannot_be_trained_is_refused(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, config: dict[str, object], words: str
) -> None:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(config))
    for key in ("model.path", "model.reference.path"):
        line = _launch(tmp_path, f"{key}={model}")
        assert line.startswith(f"error: {key}: {model} ")
        assert words in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.path=org/mistyped"], "hub, and {hub}: HTTP 404; correct model.path"),
        (["model.path=nowhere/here"], "hub, and {hub}: HTTP 404; correct model.path"),
        (["data.train.task=gsm8k", "data.eval=null"], "data.train.path: "),
    ],
)
def test_a_name_that_the_hub_lacks_is_refused_before_a_process_starts(
    tmp_path: Path, arguments: list[str], words: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        hub = f"http://127.0.0.1:{running.server_port}"
        try:
            assert words.format(hub=hub) in _launch(tmp_path, *arguments, **_at_hub(hub, tmp_path_factory))
        finally:
            running.shutdown()
            thread.join()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://a b"])
def test_a_hub_that_does_not_answer_is_named(
    url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    where = _at_hub(url, tmp_path_factory)
    assert f"hub, and {url}: " in _launch(tmp_path, "model.path=org/name", **where)


def _at_hub(url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Give the environment for a hub at this URL, with an empty cache."""
    online = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "no_proxy": "*"}
    return {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path_factory.mktemp("cache")), **online}


def test_a_port_in_use_and_an_unreadable_model_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for argument, words in (
            (f"wire.port={port}", f"wire.port: port {port} is in use"),
            (f"telemetry.metrics_port={port}", f"telemetry.metrics_port: port {port} is in use"),
            (f"model.path={tmp_path}", "config.json cannot be read"),
        ):
            command = [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", argument]
            ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
            assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
            assert words in ended.stderr


def test_a_dry_run_prints_config_and_plan_and_starts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", "--dry-run"]
    ended = subprocess.run(
        [*command, f"run.folder={tmp_path / 'run'}", "rollout.num_workers=3"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0
    assert "max_staleness" in ended.stdout
    assert all(name in ended.stdout for name in ("warm_start", "learner", "rollout-0", "rollout-1", "rollout-2"))
    assert not (tmp_path / "run").exists()
