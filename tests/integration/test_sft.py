"""From random weights to an RL run: sft learns sums, and a run starts from the model, with the accuracy of sft."""

import json
from pathlib import Path

import pytest
from support.local_runs import SMALL, with_last_values
from support.stages import command

from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import EvalRecord

pytestmark = [pytest.mark.slow, pytest.mark.rare]  # test_supervised_loss.py and others try the parts

SUMS = ("--config", "quickstart.yaml", "model.tiny.warm_start=null", "data.eval.num_prompts=50")
LEARN = (
    *(
        "learner.num_train_steps=1200",
        "learner.groups_per_step=8",
        "learner.num_minibatches=1",
        "learner.num_threads=1",
    ),
    *("learner.optimizer.learning_rate=1e-3", "learner.optimizer.schedule=constant", "data.train.num_prompts=9600"),
    *("evaluation.every_n_versions=600", "checkpoint.every_n_steps=0"),
)


def test_sft_learns_sums_and_a_run_starts_from_the_model(tmp_path: Path) -> None:
    model = command("sft", *SUMS, *LEARN, "run.folder=sft", folder=tmp_path).splitlines()[-1]
    records = [json.loads(line) for line in (tmp_path / "sft" / "sft.jsonl").read_text().splitlines()]
    held_out = [record for record in records if record["kind"] == "held_out"]
    assert [record["policy_version"] for record in held_out] == [0, 600, 1200]
    assert held_out[0]["example_accuracy"] == 0
    assert held_out[-1]["loss"] < held_out[1]["loss"] < held_out[0]["loss"]
    assert held_out[-1]["example_accuracy"] > 0.15
    changed = ("data.eval.num_prompts=50", "rollout.sampling.max_new_tokens=96", "learner.num_train_steps=1")
    run = with_last_values(*SUMS, *SMALL[3:], *changed)
    command("run", *run, f"model.path={model}", "run.folder=rl", folder=tmp_path)
    first = next(r for r in read_records(tmp_path / "rl" / "metrics.jsonl") if isinstance(r, EvalRecord))
    assert first.policy_version == 0
    assert first.accuracy > held_out[-1]["example_accuracy"] - 0.05  # near ties; other ways of adding are right, too
