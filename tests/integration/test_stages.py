"""Evaluate, generate, export and resume, each alone, on the checkpoints of a small run: as commands, on a CPU."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.local_runs import Run
from support.stages import command
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_rloo.learner.checkpoint_folder import folder_of, list_checkpoints
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import EvalRecord
from areal_rloo.telemetry.trajectories import read_trajectories

pytestmark = pytest.mark.slow


PRESSED = """
import os, signal, sys
import areal_rloo.__main__, areal_rloo.rollout.episode as episode
signal.signal(signal.SIGINT, signal.default_int_handler)
run, begun = episode.SingleTurn.run, []
async def pressed(self, *args, **named):
    begun.append(0)
    if len(begun) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return await run(self, *args, **named)
episode.SingleTurn.run = pressed
sys.exit(areal_rloo.__main__.main(sys.argv[1:]))
"""


def test_each_stage_works_alone_on_a_run(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("learner.num_train_steps=4")
    code, output = run.wait()
    assert code == 0, output
    _evaluate(run, tmp_path)
    _generate(run, tmp_path)
    _stop(run, tmp_path)
    _export(run, tmp_path)
    _resume(run, tmp_path)


def _evaluate(run: Run, folder: Path) -> None:
    """The learner's own evaluation of the last version and this one are of the same samples."""
    _, line, _ = command("evaluate", run.folder, "--output", "evaluated", folder=folder).splitlines()
    (record,) = read_records(folder / "evaluated" / "metrics.jsonl")
    own = [r for r in read_records(run.folder / "metrics.jsonl") if isinstance(r, EvalRecord)][-1]
    assert isinstance(record, EvalRecord)
    assert (record.policy_version, record.num_prompts, record.num_failed) == (4, 8, 0)
    assert (record.accuracy, record.completion_tokens_mean) == (own.accuracy, own.completion_tokens_mean)
    assert line.startswith(f"arithmetic: accuracy {record.accuracy:.3f}")
    samples = list(read_trajectories(folder / "evaluated" / "trajectories.jsonl"))
    assert len(samples) == 8
    assert all(version == 4 for sample in samples for version, _ in sample.versions)

    several = ("data.eval.num_samples=3", "data.eval.temperature=1", "--step", "2", "--output", "several")
    assert "8 prompts, 3 samples each, pass@3 0." in command("evaluate", run.folder, *several, folder=folder)


def _generate(run: Run, folder: Path) -> None:
    """The logprobs of the file are those of the model in the checkpoint, by another library."""
    printed = command("generate", run.folder, "--num-prompts", "3", "--output", "made.jsonl", folder=folder)
    assert printed == "12 samples: made.jsonl\n"
    rows = [json.loads(line) for line in (folder / "made.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert {(row["sample_index"], row["policy_version"], row["failure"]) for row in rows} == {
        (index, 4, None) for index in range(4)
    }
    model = AutoModelForCausalLM.from_pretrained(list_checkpoints(folder_of(run.folder))[4] / "model")
    for row in rows:
        ids = torch.tensor([row["prompt_token_ids"] + row["token_ids"]])
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        num_prompt = len(row["prompt_token_ids"])
        expected = [logprobs[place - 1, ids[0, place]].item() for place in range(num_prompt, ids.shape[1])]
        np.testing.assert_allclose(row["logprobs"], expected, atol=2e-4)


def _stop(run: Run, folder: Path) -> None:
    """Ctrl-C falls into the code of an episode, and is no failed sample."""
    file = folder / "stopped.parquet"
    for words in (("evaluate", "--output", "stopped"), ("generate", "--output", file.name)):
        arguments = [words[0], str(run.folder), *words[1:]]
        ended = subprocess.run(
            [sys.executable, "-c", PRESSED, *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 130, ended.stderr
        assert "stopped; the" in ended.stderr
    assert "KeyboardInterrupt" not in (folder / "stopped" / "trajectories.jsonl").read_text()
    assert not file.exists() or b"KeyboardInterrupt" not in file.read_bytes()  # without rows there is no file


def _export(run: Run, folder: Path) -> None:
    command("export", run.folder, "--to", "model", folder=folder)
    checkpoint = list_checkpoints(folder_of(run.folder))[4]
    assert (folder / "model" / "model.safetensors").read_bytes() == (
        checkpoint / "model" / "model.safetensors"
    ).read_bytes()
    AutoModelForCausalLM.from_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(folder / "model")
    card = (folder / "model" / "README.md").read_text()
    assert "| algorithm.preset | rloo |" in card
    assert "- before training (version 0): arithmetic: accuracy" in card


def _resume(run: Run, folder: Path) -> None:
    output = command("resume", run.folder, "learner.num_train_steps=5", folder=folder)
    assert "step 5/5" in output
    assert [record.policy_version for record in run.records()] == [1, 2, 3, 4, 5]
