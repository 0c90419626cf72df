"""Build the learner of a moment of a run, and feed recorded batches to it, on the calling thread.

A repeated step equals the recorded step to the bit on the same kind of CPU, with the same software and number of
threads. GPU kernels may add numbers in another order in each run; there, a replay agrees up to rounding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from areal_rloo.config import Config, import_entry, load_config
from areal_rloo.errors import ConfigError, DataError
from areal_rloo.learner.batches import Start, read_batch
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import read_state
from areal_rloo.learner.reporting import batch_numbers
from areal_rloo.learner.team import Team
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.models.files import load_tokenizer, stop_token_ids
from areal_rloo.replay.recording import Part, Recording

Numbers = Mapping[str, Any]


class Repeated(NamedTuple):
    """A step of the run and the same step of the replay."""

    step: int
    recorded: Numbers | None  # None: metrics.jsonl has no record of the step
    replayed: Numbers | None  # None: the replay refused all batches, because nothing was finite
    as_many_refused: bool  # True if the run and the replay refused the same batches

    @property
    def different(self) -> list[str]:
        """Name the numbers with a different bit; empty without a record."""
        if self.recorded is None:
            return []
        if self.replayed is None or not self.as_many_refused:
            return ["refused batches"]
        pairs = {name: (self.recorded[name], value) for name, value in self.replayed.items()}
        # In JSON, as in metrics.jsonl: equal texts are equal bits, and NaN equals NaN.
        return [name for name, pair in pairs.items() if len({msgspec.json.encode(value) for value in pair}) > 1]


def load_start_config(start: Start, overrides: Sequence[str]) -> Config:
    """Load the config of a start with overrides; raises ConfigError if a replay cannot run with it."""
    config = _loaded(start, overrides)
    learner = config.learner
    for key, value, single, fits in (
        ("learner.num_ranks", learner.num_ranks, 1, learner.num_ranks == 1),
        ("learner.offload", learner.offload, "none", learner.offload != "parameters"),
    ):
        if not fits:
            raise ConfigError(
                f"{key}: expected {single}, because a replay is a single process, got {value}; --set {key}={single} "
                "gives numbers that agree up to rounding"
            )
    return config


def _loaded(start: Start, overrides: Sequence[str]) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(start.config, encoding="utf-8")
        return load_config(str(path), overrides)


def build_train_step(part: Part, config: Config, *, model_path: str, device: str) -> TrainStep:
    """Build the learner at the beginning of a part."""
    if Path(model_path).is_absolute() and not Path(model_path).is_dir():
        raise DataError(f"{model_path}: the initial model is gone; name its folder with --model")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise DataError(f"--device {device}: this machine has no GPU; --device cpu gives numbers up to rounding")
    torch.set_num_threads(part.start.num_threads)
    import_entry(config.run.entry)
    torch.manual_seed(config.run.seed)
    rank = build_rank(config, model_path=model_path, device=torch.device(device))
    stops = stop_token_ids(model_path, load_tokenizer(model_path))
    train_step = TrainStep(Team(rank), config, stop_token_ids=stops)
    if part.checkpoint is not None:
        state = read_state(part.checkpoint)
        rank.load(part.checkpoint / "shards", num_optimizer_steps=state.num_optimizer_steps)
        if config.algorithm.kl == _loaded(part.start, ()).algorithm.kl:  # else an override decides
            train_step.resume(state.kl_coefficient)
    return train_step


def repeat(train_step: TrainStep, recording: Recording, steps: range) -> Iterator[Repeated]:
    """Repeat these steps in order."""
    for step in steps:
        yield _repeated(train_step, recording, step)


def _repeated(train_step: TrainStep, recording: Recording, step: int) -> Repeated:
    """Train on the batches of a step until a batch changes the weights, as the learner does."""
    paths, record = recording.batches[step], recording.records.get(step)
    for number, path in enumerate(paths):
        batch = read_batch(path)
        result = train_step.step(batch, policy_version=step - 1)
        if result.updates.num_optimizer_steps == 0:
            continue
        replayed = {**batch_numbers(batch), **result.numbers}
        recorded = None if record is None else {name: getattr(record, name) for name in replayed}
        return Repeated(step, recorded, replayed, number == len(paths) - 1)
    return Repeated(step, None if record is None else msgspec.structs.asdict(record), None, record is None)
