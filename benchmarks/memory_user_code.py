"""The user's code of `memory.py`: sleeps in each optimizer step of the learner, and in each episode of a worker."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence

from areal_rloo.config import Config
from areal_rloo.rollout.episode import Rewards, Sample, SingleTurn, TurnEngine
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Trajectory

_LEARNER_SLEEP_S = float(os.environ["BENCHMARK_LEARNER_SLEEP_S"])
_SAMPLE_SLEEP_S = float(os.environ["BENCHMARK_SAMPLE_SLEEP_S"])

if _LEARNER_SLEEP_S > 0 and "areal_rloo.learner" in sys.orig_argv:  # torch would be most of the launcher's memory
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda *_: time.sleep(_LEARNER_SLEEP_S))


class PatientEpisode:
    """A single turn after a sleep."""

    def __init__(self, config: Config) -> None:
        self._episode = SingleTurn()

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        if sample.purpose == "train":
            await asyncio.sleep(_SAMPLE_SLEEP_S)
        return await self._episode.run(sample, engine, rewards, chat)
