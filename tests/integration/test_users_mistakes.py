"""Whole runs with a user's mistakes: rewards that cannot be imported or always fail, and invalid rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import family_config, save_family
from transformers import Qwen2ForSequenceClassification

from areal_rloo.models.tiny import make_tiny_tokenizer

REPO = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def _run(folder: Path, function: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", f"run.folder={folder}"),
        *("model.tiny.warm_start=null", "model.tiny.hidden_size=48", "model.tiny.num_layers=2", "data.eval=null"),
        *("rollout.num_slots=8", "rollout.sampling.max_new_tokens=8", "rollout.num_reward_workers=1"),
        *("algorithm.group_size=2", "learner.groups_per_step=4", "learner.num_train_steps=5"),
        *((f"data.train.rewards=[{{function: {function}}}]",) if function else ()),
        *arguments,
    ]
    return subprocess.run(
        command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=200
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.py:score", "nowhere.py cannot be imported: FileNotFoundError: no such file"),
        ("{folder}/mine.py:scor", "mine.py has no function 'scor'"),
        ("{folder}/mine.py", "expected module:function or path/to/file.py:function"),
        ("{folder}/mine.py:named", "named has the parameter 'anser', which nothing fills"),
    ],
)
def test_a_reward_that_cannot_be_imported_gives_one_line_at_start(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "mine.py").write_text("def score(completion): return 1.0\ndef named(anser): return 1.0\n")
    done = _run(tmp_path / "run", name.format(folder=tmp_path))
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("error: data.train")
    assert words in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_tensor_of_no_parameter_is_refused_before_a_start(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_family("llama", model)
    make_tiny_tokenizer().save_pretrained(model)
    weights = model / "model.safetensors"
    more = {**load_file(weights), "v_head.weight": torch.zeros(1, 64)}
    save_file(more, weights, metadata={"format": "pt"})
    (tmp_path / "mine.py").write_text("def score(completion): return 1.0\n")
    done = _run(tmp_path / "run", f"{tmp_path}/mine.py:score", f"model.path={model}", "telemetry.progress=false")
    assert done.returncode == 2, done.stdout
    (error,) = done.stdout.splitlines()
    assert error.startswith("error: model.path: ") and "has weights v_head.weight (1 such tensors)" in error
    assert not (tmp_path / "run").exists()


def test_a_mistake_that_a_worker_finds_is_the_only_line(tmp_path: Path) -> None:
    """The launcher ends the learner then, and says nothing about it."""
    model = tmp_path / "model"
    Qwen2ForSequenceClassification(family_config("qwen2", num_labels=2)).save_pretrained(model)
    make_tiny_tokenizer().save_pretrained(model)
    done = _run(tmp_path / "run", "", f"data.train.rewards=[{{model: {model}}}]", "telemetry.progress=false")
    assert done.returncode == 2, done.stdout
    error, logs = done.stdout.splitlines()
    assert error.startswith("error: data.train") and "got 2 labels" in error
    assert logs.startswith("logs: ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "p"}\n{"text": "q"}\n', "rows.jsonl:2: expected a text or messages in the field 'prompt'"),
        (b'{"prompt": 3}\n', "rows.jsonl:1: expected a text or messages in the field 'prompt', got int"),
        (b"", "rows.jsonl: no row in it"),
        (b'{"prompt": "p"}\n{"prompt": "\xff"}\n', "rows.jsonl:2: not UTF-8"),
        (b'{"id": 1, "prompt": "p"}\n{"id": 1, "prompt": "q"}\n', "rows.jsonl:2: the field 'id' is 1, as in"),
        (b'{"prompt": "p"\n', "rows.jsonl:1: not valid JSON"),
    ],
)
def test_bad_data_gives_one_line_before_any_process_starts(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "mine.py").write_text("def score(completion): return 1.0\n")
    (tmp_path / "rows.jsonl").write_bytes(content)
    rows = ("data.train.task=rows", f"data.train.path={tmp_path / 'rows.jsonl'}")
    for more in ((), ("--dry-run",)):
        done = _run(tmp_path / "run", f"{tmp_path / 'mine.py'}:score", *rows, *more)
        assert done.returncode == 2
        assert done.stdout.count("\n") == 1
        assert words in done.stdout
        assert not (tmp_path / "run").exists()


def test_a_reward_that_always_fails_ends_the_run_with_a_traceback(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text("def score(completion):\n    return {}['no such key']\n")
    done = _run(tmp_path / "run", f"{tmp_path / 'mine.py'}:score")
    assert done.returncode == 2, done.stdout
    assert "more than rollout.max_reward_failure_share=0.5" in done.stdout
    assert "KeyError: 'no such key'" in done.stdout
    assert "Traceback" not in done.stdout
    assert "return {}['no such key']" in (tmp_path / "run" / "logs" / "learner.log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit_reason"] == "failed"
    assert summary["ledger"]["dropped"]["reward_error"] > 0
    looked = subprocess.run(
        [sys.executable, "-m", "areal_rloo.inspect", str(tmp_path / "run"), "--dropped", "reward_error", "--limit=1"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "KeyError: 'no such key'" in looked.stdout
