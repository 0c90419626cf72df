"""Run a training with a fixed staleness: the quickstart's job in a single process and thread, alternating.

Used by `staleness.py` and `algorithms.py`. The step at version v trains on a batch sampled by the weights of version
max(0, v - s). `fixed`: s is eta at every step, the worst case within the bound. `mixed`: s is uniform over 0 .. eta at
every step. The staleness does not depend on the speed of the machine. Engine, tokenizer, task, reward and train step
come from the package. Config and seed determine a run.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from areal_rloo.config import Config, load_config
from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.intake.prompts import Prompt, PromptStream
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.rank import LearnerRank
from areal_rloo.learner.team import Team
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.learner.warm_start import prepare_tiny_model
from areal_rloo.models.files import load_tokenizer, stop_token_ids
from areal_rloo.tasks import Task, load_eval, load_train, make_task
from areal_rloo.tasks.chat import ChatFormat, Tokenizer
from areal_rloo.trajectory import Completion, Group, Trajectory

CPU = torch.device("cpu")
EVALUATE_EVERY = 5
SEEDS = (0, 1, 2)
NUM_STEPS = 60
GROUPS_PER_STEP = 24
T_OF_TWO_DEGREES = 4.303  # 97.5 % quantile of Student's t for three seeds
SETUP = {  # of every experiment, for the result file
    "num_steps": NUM_STEPS,
    "groups_per_step": GROUPS_PER_STEP,
    "evaluate_every_versions": EVALUATE_EVERY,
    "seeds": list(SEEDS),
}


@dataclass(frozen=True, slots=True)
class Job:
    """Describe a run: the name in the table, overrides of quickstart.yaml, seed and staleness.

    `model` is a folder; None: the quickstart's tiny model. `change` may change the learner before the first step, for a
    method that the package does not have.
    """

    name: str
    overrides: tuple[str, ...]
    seed: int
    eta: int
    schedule: Literal["fixed", "mixed"] = "fixed"
    model: str | None = None
    num_steps: int = NUM_STEPS
    groups_per_step: int = GROUPS_PER_STEP
    change: Callable[[LearnerRank], None] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold the results of a run. Accuracies are greedy, on held-out prompts, every `EVALUATE_EVERY` from version 0.

    Attributes:
        job: the run.
        accuracies: by evaluation.
        behaviour_kl: mean of the second half of the steps, of behaviour to current (k3), nats a token.
        effective_sample_share: mean of the second half of the steps.
    """

    job: Job
    accuracies: tuple[float, ...]
    behaviour_kl: float
    effective_sample_share: float

    @property
    def final(self) -> float:
        """Return the mean of the last two evaluations, which has less noise than the last alone."""
        return sum(self.accuracies[-2:]) / 2

    @property
    def area(self) -> float:
        """Return the area under accuracy over versions (trapezoids); 1 for a run without errors."""
        pairs = zip(self.accuracies, self.accuracies[1:], strict=False)
        return sum((a + b) / 2 for a, b in pairs) / (len(self.accuracies) - 1)


def over_seeds(**measures: Sequence[float]) -> dict[str, float]:
    """Return mean and half the width of the 95 % interval (Student's t) of each measure, of a value for each seed."""
    row: dict[str, float] = {}
    for name, values in measures.items():
        assert len(values) == len(SEEDS) == 3, "the quantile is for three seeds"
        row[f"{name}_mean"] = round(statistics.fmean(values), 4)
        row[f"{name}_interval"] = round(T_OF_TWO_DEGREES * statistics.stdev(values) / math.sqrt(len(values)), 4)
    return row


def run_all(jobs: Sequence[Job]) -> Iterator[Outcome]:
    """Run the jobs, one per core at a time, each in a process of its own. Yield outcomes in the order of the jobs."""
    prepare_tiny_model(load_config("quickstart.yaml"))  # prepare once, before all processes need the model
    num_cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(num_cores, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for outcome in pool.map(run, jobs):
            shown = " ".join(f"{accuracy:.3f}" for accuracy in outcome.accuracies)
            print(f"{outcome.job.name} seed {outcome.job.seed} eta {outcome.job.eta}: {shown}", flush=True)
            yield outcome


def run(job: Job) -> Outcome:
    """Train a job from the warm start to the last evaluation."""
    torch.set_num_threads(1)
    config = load_config(
        "quickstart.yaml",
        [
            f"run.seed={job.seed}",
            f"algorithm.max_staleness={job.eta}",
            f"learner.num_train_steps={job.num_steps}",
            f"learner.groups_per_step={job.groups_per_step}",
            *job.overrides,
        ],
    )
    return _Loop(config, job).run()


class _Loop:
    def __init__(self, config: Config, job: Job) -> None:
        self._config = config
        self._job = job
        folder = job.model or prepare_tiny_model(config).path
        tokenizer = load_tokenizer(folder)
        stops = stop_token_ids(folder, tokenizer)
        self._rollout = _Rollout(config, folder, tokenizer, stops)
        rank = build_rank(config, model_path=folder, device=CPU)
        if job.change is not None:
            job.change(rank)
        self._step = TrainStep(Team(rank), config, stop_token_ids=stops)
        self._stream = PromptStream(
            load_train(config.data, seed=config.run.seed),
            Tokenizer(ChatFormat(tokenizer, config.data), config.data),
            seed=config.run.seed,
            num_epochs=None,
        )

    def run(self) -> Outcome:
        torch.manual_seed(self._config.run.seed)
        published = deque([self._weights()], maxlen=self._job.eta + 1)  # newest last
        draw = np.random.default_rng([self._config.run.seed, 1])
        accuracies = [self._rollout.accuracy(published[-1])]
        kls, shares = [], []
        for version in range(self._job.num_steps):
            staleness = self._job.eta if self._job.schedule == "fixed" else int(draw.integers(0, self._job.eta + 1))
            staleness = min(staleness, version)
            prompts = [self._take() for _ in range(self._config.learner.groups_per_step)]
            batch = self._rollout.batch(prompts, published[-1 - staleness], version - staleness, step=version)
            result = self._step.step(batch, policy_version=version)
            published.append(self._weights())
            if version >= self._job.num_steps // 2:
                kls.append(result.numbers["behaviour_kl_k3"])
                shares.append(result.numbers["effective_sample_share"])
            if (version + 1) % EVALUATE_EVERY == 0:
                accuracies.append(self._rollout.accuracy(published[-1]))
        self._rollout.close()
        return Outcome(self._job, tuple(accuracies), statistics.fmean(kls), statistics.fmean(shares))

    def _weights(self) -> dict[str, torch.Tensor]:
        return self._step.team.whole_weights()

    def _take(self) -> Prompt:
        prompt = self._stream.take()
        assert prompt is not None, "the stream has no last epoch"
        return prompt


class _Rollout:
    """Generate and score with the given weights."""

    def __init__(self, config: Config, folder: str, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._stops = stops
        self._engine = EmbeddedEngine(
            Path(folder), device=CPU, dtype=torch.float32, num_slots=64, context_tokens=config.context_tokens
        )
        self._train_task = make_task("data.train", config.data.train_sources[0], seed=config.run.seed)
        self._eval_task = make_task("data.eval", config.data.eval_sources[0], seed=config.run.seed)
        tokenize = Tokenizer(ChatFormat(tokenizer, config.data), config.data)
        tokenized = [
            (tokenize(item, number), item)
            for number, item in enumerate(load_eval(config.data, seed=config.run.seed)[0].items)
        ]
        self._eval_prompts = [Prompt(0, i, tokens, item) for i, (tokens, item) in enumerate(tokenized) if tokens]
        self._num_requests = 0
        self._num_loads = 0

    def batch(
        self, prompts: list[Prompt], weights: dict[str, torch.Tensor], behaviour_version: int, *, step: int
    ) -> list[Group]:
        """Sample a group for each prompt. Tag every token with the version of these weights."""
        size = self._config.algorithm.group_size
        sampling = self._config.rollout.sampling
        parameters = [
            SamplingParameters(
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                seed=int(np.random.SeedSequence([self._config.run.seed, step, index]).generate_state(1)[0]),
                stop_token_ids=self._stops,
            )
            for index in range(len(prompts) * size)
        ]
        owners = [prompt for prompt in prompts for _ in range(size)]
        completions = [
            msgspec.structs.replace(completion, versions=np.full_like(completion.versions, behaviour_version))
            for completion in self._generate(owners, parameters, weights)
        ]
        trajectories = [
            Trajectory(
                step * len(prompts) + index // size,
                index % size,
                np.array(prompt.tokens, np.int32),
                completion,
                self._score(self._train_task, prompt, completion),
            )
            for index, (prompt, completion) in enumerate(zip(owners, completions, strict=True))
        ]
        starts = range(0, len(trajectories), size)
        return [Group(trajectories[i].group_id, step, tuple(trajectories[i : i + size])) for i in starts]

    def accuracy(self, weights: dict[str, torch.Tensor]) -> float:
        """Return the greedy accuracy on the held-out prompts."""
        greedy = SamplingParameters(
            max_new_tokens=self._config.eval_max_new_tokens, greedy=True, stop_token_ids=self._stops
        )
        completions = self._generate(self._eval_prompts, [greedy] * len(self._eval_prompts), weights)
        scores = [self._score(self._eval_task, p, c) for p, c in zip(self._eval_prompts, completions, strict=True)]
        return sum(scores) / len(scores)

    def close(self) -> None:
        self._engine.close()

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParameters],
        weights: dict[str, torch.Tensor],
    ) -> list[Completion]:
        self._num_loads += 1  # the engine accepts only increasing versions, but here older weights return
        assert self._engine.load_weights(self._num_loads, list(weights.items())).result() == self._num_loads
        first = self._num_requests
        self._num_requests += len(prompts)
        requests = [
            GenerationRequest(str(first + index), prompt.tokens, one)
            for index, (prompt, one) in enumerate(zip(prompts, sampling, strict=True))
        ]
        return [future.result() for future in self._engine.submit(requests)]

    def _score(self, task: Task, prompt: Prompt, completion: Completion) -> float:
        text = self._tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True)
        return float(task.reward(str(text), prompt.item))
