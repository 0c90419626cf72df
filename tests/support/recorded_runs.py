"""A recorded run without workers: a train step on random batches, and the files that a learner leaves."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from support.checkpoints import checkpoint_state
from support.train_steps import ragged_groups, replaced

from areal_rloo.config import dump_config, load_config
from areal_rloo.learner.batches import BatchRecorder, Start, software
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.learner.reporting import batch_numbers
from areal_rloo.learner.team import Team
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.models.files import load_tokenizer, stop_token_ids
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.records import LedgerCounts, TrainRecord
from areal_rloo.trajectory import Group, Trajectory

CPU = torch.device("cpu")
OPTIONS = (
    "learner.num_minibatches=2",
    "learner.num_train_steps=20",
    "learner.optimizer={schedule: cosine, warmup_steps: 2, learning_rate: 1e-3}",
    "algorithm.loss.behaviour_weight={rule: none, upper: null}",
    "algorithm.kl={coefficient: 0.1, adaptive: {target: 0.001, horizon: 100}}",
    "model.reference.refresh_every_n_versions=2",
    "wire.record=true",
)
_OF_THE_LOOP = (  # fields that no replay compares
    *("wall_s", "skipped_steps", "failed_checkpoints", "wait_s", "learner_idle_s", "rollout_idle_s", "num_workers"),
    "weights_behind",
    *(
        "generated_tokens",
        "generated_tokens_per_s",
        "trained_tokens_per_s",
        "filtered_prompts",
        "epoch",
        "truncated_prompts",
    ),
    *("rollout_busy_s", "decoding_s", "steps_since_start"),
)
_LEDGER = LedgerCounts(admitted=0, trained=0, dropped={}, dropped_tokens={}, buffered=0, in_flight=0)


def batch_of(step: int) -> list[Group]:
    """Make a batch whose tokens are no newer than the version before this step."""

    def older(trajectory: Trajectory) -> Trajectory:
        versions = np.minimum(trajectory.completion.versions, step - 1)
        return msgspec.structs.replace(
            trajectory, completion=msgspec.structs.replace(trajectory.completion, versions=versions)
        )

    return replaced(ragged_groups(step), older)


def without_finite_gradient(batch: Sequence[Group]) -> list[Group]:
    """Make the squares of the gradient overflow: huge rewards, and tokens that the behaviour policy found unlikely."""

    def huge(trajectory: Trajectory) -> Trajectory:
        unlikely = np.full_like(trajectory.completion.behaviour_logprobs, -100)
        completion = msgspec.structs.replace(trajectory.completion, behaviour_logprobs=unlikely)
        return msgspec.structs.replace(trajectory, completion=completion, reward=9e11 * (trajectory.sample_index % 2))

    return replaced(list(batch), huge)


class RecordedRun:
    """A learner without workers; `step` and `save` do as the loop does."""

    def __init__(self, folder: Path, model: Path, *overrides: str) -> None:
        config = load_config("quickstart.yaml", [*OPTIONS, *overrides])
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(config))
        rank = build_rank(config, model_path=str(model), device=CPU)
        tokenizer = load_tokenizer(str(model))
        self.folder, self.version = folder, 0
        self.train_step = TrainStep(Team(rank), config, stop_token_ids=stop_token_ids(str(model), tokenizer))
        self._config, self._tokenizer = config, tokenizer
        start = Start(
            policy_version=0,
            config=dump_config(config),
            model_path=str(model),
            device="cpu",
            num_threads=torch.get_num_threads(),
            software=software("cpu"),
        )
        self.recorder = BatchRecorder(folder / "batches", start)
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._checkpoints = Checkpoints(folder / "checkpoints")

    def step(self, batch: Sequence[Group]) -> None:
        self.recorder.append(batch, policy_version=self.version)
        result = self.train_step.step(batch, policy_version=self.version)
        if result.updates.num_optimizer_steps == 0:
            return
        self.version += 1
        numbers = {**batch_numbers(batch), **result.numbers, **result.measured}
        of_the_loop = dict.fromkeys(_OF_THE_LOOP, 0) | {"num_train_steps": self.version, "policy_version": self.version}
        of_the_loop["idle_share"] = {}
        self._metrics.append(TrainRecord(**of_the_loop, **numbers, ledger=_LEDGER))

    def save(self) -> None:
        state = msgspec.structs.replace(
            checkpoint_state(self.version),
            kl_coefficient=self.train_step.kl_coefficient,
            num_optimizer_steps=self.train_step.team.num_optimizer_steps,
        )
        self._checkpoints.save(state, self._config, self.train_step.team, self._tokenizer)
        assert self._checkpoints.wait()

    def close(self) -> Path:
        self.recorder.close()
        self._metrics.close()
        return self.folder
