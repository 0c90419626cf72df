"""Make samples in this process: wanted samples in, samples out. Engine and rewards are those of a rollout worker.

Runs on one event loop. Nothing sends new weights, so all tokens have the version of the model.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from areal_rloo.config import Config
from areal_rloo.errors import (
    ArealRlooError,
    ConfigError,
    EpisodeError,
    PreflightError,
    SampleError,
    described,
    shortened,
)
from areal_rloo.intake.prompts import Prompt
from areal_rloo.launcher.hosts import ClaimedGpus, real_host
from areal_rloo.learner.recording import RecordMaker
from areal_rloo.models.files import load_tokenizer, model_folder, stop_token_ids
from areal_rloo.rewards import make_scoring
from areal_rloo.rollout.deadline import Deadlines, checked_trajectories, run_episode
from areal_rloo.rollout.engines import running_engine
from areal_rloo.rollout.episode import Episode, Rewards, Sample, SampleEngine, Submitter
from areal_rloo.rollout.episode_types import make_episode, serving
from areal_rloo.rollout.worker import sampling_of
from areal_rloo.tasks.chat import ChatFormat, chat_format
from areal_rloo.telemetry.trajectories import TrajectoryRecord
from areal_rloo.trajectory import SampleId, Trajectory, purpose_of
from areal_rloo.wire.columns import Limits

_AHEAD = 2  # times the slots: the engine never waits for an episode to begin


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sample to make. A negative group id means an evaluation sample, with the sampling of an evaluation set."""

    sample_id: SampleId
    prompt: Prompt
    seed: int


@dataclass(frozen=True, slots=True)
class Made:
    """The outcome of a wanted sample; without trajectories the reason and the detail say why there are none."""

    wanted: Wanted
    trajectories: Sequence[Trajectory]
    reason: str = ""
    detail: str = ""


def record_of(made: Made, records: RecordMaker, policy_version: int) -> Iterator[TrajectoryRecord]:
    """Give the records of a sample, for trajectories.jsonl."""
    lost = {"dropped": made.reason, "detail": made.detail} if made.reason else {}
    return records.of_sample(made.wanted.sample_id, made.trajectories, made.wanted.prompt, policy_version, **lost)


@dataclass(frozen=True, slots=True)
class Model:
    """The folder of a model, the tokenizer, and the form of prompts."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat


def load_model(config: Config) -> Model:
    """Find the model of a config, and load the tokenizer.

    Raises:
        ModelError: the files cannot be had or read.
    """
    folder = model_folder(config.model.path)
    tokenizer = load_tokenizer(str(folder))
    return Model(folder, tokenizer, chat_format(tokenizer, config))


def alone(config: Config) -> Config:
    """Return a config for one engine without a learner.

    Raises:
        ConfigError: the config names running servers, which may hold other weights.
    """
    if config.rollout.server_urls:
        raise ConfigError(
            f"rollout.{config.rollout.engine}.urls: expected none here, because a running server may hold other "
            "weights; leave them out, and a server is started"
        )
    rollout = msgspec.structs.replace(config.rollout, num_workers=1, share_devices="never")
    learner = msgspec.structs.replace(config.learner, lora=None)
    return msgspec.structs.replace(config, rollout=rollout, learner=learner)


async def make_samples(
    config: Config, model: Model, folder: Path, wanted: Iterable[Wanted], *, policy_version: int
) -> AsyncGenerator[Made]:
    """Make samples and give each as soon as the episode has ended.

    Args:
        config: as `alone` returns it.
        model: as `load_model` returns it.
        folder: for the log of a server.
        wanted: the samples, taken as the engine gets room for them.
        policy_version: of the weights, as the tokens tell it.

    Raises:
        UserError: the model, the rewards or the episode cannot be used.
        ArealRlooError: the engine is gone, or no reward can be computed any more.
    """
    device, num_threads = _place(config)
    torch.set_num_threads(num_threads)
    async with running_engine(
        config,
        model.folder,
        worker_id="rollout-0",
        device=device,
        num_threads=num_threads,
        server_url=None,
        run_folder=folder,
    ) as running:
        rewards = await make_scoring(config)
        try:
            episode = make_episode(config)
            maker = _Maker(
                config,
                submitter=Submitter(running.engine, context_tokens=config.context_tokens),
                episode=episode,
                rewards=rewards,
                chat=model.chat,
                stop_token_ids=stop_token_ids(str(model.folder), model.tokenizer),
                policy_version=policy_version,
            )
            async with serving(episode):
                async for made in _as_they_end(maker, iter(wanted), _AHEAD * config.rollout.num_slots):
                    yield made
        finally:
            await rewards.close()


def _place(config: Config) -> tuple[torch.device, int]:
    """Choose the device and the threads of the engine; the GPUs are locked until the process ends.

    Raises:
        PreflightError: too few GPUs are free.
    """
    host = real_host(config.launcher)
    if config.rollout.device == "cpu" or (config.rollout.device == "auto" and not host.gpu_ids):
        return torch.device("cpu"), host.num_cores
    gpus, num = ClaimedGpus(), config.rollout.tensor_parallel
    free = gpus.claim(host).gpu_ids
    if len(free) < num:
        raise PreflightError(
            f"rollout.device: expected {num} free GPUs, got {len(free)} of {len(host.gpu_ids)}; wait for other runs, "
            "or set it to cpu"
        )
    gpus.keep(free[:num])
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(free[:num])  # before torch looks
    return torch.device("cuda"), host.num_cores


async def _as_they_end(maker: _Maker, wanted: Iterable[Wanted], most: int) -> AsyncIterator[Made]:
    def begun(number: int) -> set[asyncio.Task[Made]]:
        return {
            asyncio.create_task(maker.make(sample), name=f"sample {sample.sample_id}")
            for sample in itertools.islice(wanted, number)
        }

    pending = begun(most)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            pending |= begun(len(done))
            for task in done:
                yield task.result()
    finally:
        for task in pending:
            task.cancel()


class _Maker:
    """Runs the episodes of samples."""

    def __init__(
        self,
        config: Config,
        *,
        submitter: Submitter,
        episode: Episode,
        rewards: Rewards,
        chat: ChatFormat,
        stop_token_ids: tuple[int, ...],
        policy_version: int,
    ) -> None:
        self._config, self._submitter, self._episode, self._rewards = config, submitter, episode, rewards
        self._chat, self._stop_token_ids = chat, stop_token_ids
        self._policy_version = policy_version
        self._deadlines = Deadlines(config.rollout.episode.timeout_s)
        self._limits = Limits(config.wire.max_message_bytes, config.rollout.episode.max_trajectories)

    async def make(self, wanted: Wanted) -> Made:
        """Run the episode of a sample. A failure of the sample alone is an outcome, too."""
        item, purpose = wanted.prompt.item, purpose_of(wanted.sample_id[0])
        sample = Sample(wanted.sample_id, purpose, item, wanted.prompt.tokens)
        engine = SampleEngine(
            submitter=self._submitter,
            name="/".join(map(str, wanted.sample_id)),
            sampling=sampling_of(self._config, sample, wanted.seed, self._stop_token_ids),
            max_turn_tokens=self._config.episode_of(item.source).max_turn_tokens,
        )
        try:
            given = await run_episode(self._episode, sample, engine, self._rewards, self._chat, self._deadlines)
            trajectories, _ = checked_trajectories(sample, given, self._limits)
            return Made(wanted, [self._tagged(trajectory) for trajectory in trajectories])
        except SampleError as error:
            failure = error
        except ArealRlooError:
            raise  # the engine is gone, or no reward can be computed any more
        except Exception as error:  # noqa: BLE001 - an episode may be the user's code
            failure = EpisodeError("episode_error", described(error))
        finally:
            self._deadlines.ended(purpose)
        return Made(wanted, (), failure.reason, shortened(failure.detail))

    def _tagged(self, trajectory: Trajectory) -> Trajectory:
        """Tag the tokens with the version of the model: an engine counts from 0."""
        versions = trajectory.completion.versions + np.int32(self._policy_version)
        return msgspec.structs.replace(
            trajectory, completion=msgspec.structs.replace(trajectory.completion, versions=versions)
        )
