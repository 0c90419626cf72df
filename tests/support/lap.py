"""A lap of the loop in a single process, from a prompt to new weights in the engine, with real parts on both ends.

`files_of_a_lap` returns the files of the package whose functions run during the lap.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from support.driven_learner import make_worker
from support.workers import fresh_address, make_channel

import areal_rloo
from areal_rloo.config import Config, load_config
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.service import IntakeService
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.team import Team
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.loop_thread import LoopThread
from areal_rloo.models.files import load_tokenizer, stop_token_ids
from areal_rloo.rewards import make_scoring
from areal_rloo.rollout.episode import SingleTurn
from areal_rloo.tasks import load_train
from areal_rloo.tasks.chat import ChatFormat, Tokenizer
from areal_rloo.weights.broadcast import Broadcaster
from areal_rloo.weights.offers import Offers
from areal_rloo.weights.shared_memory import SharedMemorySender
from areal_rloo.wire.address import Address
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.columns import Limits

PACKAGE = Path(areal_rloo.__file__).parent
CPU = torch.device("cpu")
SMALL = (
    "learner.groups_per_step=2",
    "learner.num_minibatches=2",
    "learner.num_train_steps=9",
    "algorithm.group_size=4",
    "algorithm.max_staleness=0",
    "rollout.sampling.max_new_tokens=8",
    "rollout.num_reward_workers=1",
)


def files_of_a_lap(folder: Path, scratch: Path) -> set[str]:
    """Run two laps; return the files that the second runs through, relative to the package.

    Args:
        folder: of a small model.
        scratch: an empty folder.
    """
    config = load_config("quickstart.yaml", [*SMALL, f"model.path={folder}"])
    with _tracing() as files:
        rank = build_rank(config, model_path=str(folder), device=CPU)
        tokenizer = load_tokenizer(str(folder))
        chat, stops = ChatFormat(tokenizer, config.data), stop_token_ids(str(folder), tokenizer)
        transport = SharedMemorySender(rank.manifest, scratch / "segments")
        offers = Offers(together=False, timeout_s=60, call_timeout_s=1)
        broadcaster = Broadcaster(manifest=rank.manifest, transport=transport, offers=offers)
        train = load_train(config.data, seed=0)
        intake = Intake(
            config,
            ledger=Ledger(),
            stream=PromptStream(train, Tokenizer(chat, config.data), seed=0, num_epochs=None),
            evaluation=Evaluation([], lambda _: None),
            offers=offers,
            policy_version=0,
            history=(("learner", 0),),
            lies=Lies(config, vocab_size=int(rank.policy.causal.config.vocab_size)),
        )
        train_step = TrainStep(Team(rank), config, stop_token_ids=stops)
        service = IntakeService(
            intake,
            broadcaster,
            lambda: LearnerChannel.bind(fresh_address(), limits=Limits()),
            heartbeat_s=0.1,
        )
        engine = EmbeddedEngine(
            folder, device=CPU, dtype=torch.float32, num_slots=8, context_tokens=config.context_tokens
        )
        worker, ended = LoopThread("worker"), threading.Event()
        worker.begin(_work(config, engine, chat, stops, service.channel.address), lambda task: ended.set())
        for version in range(1, 3):
            files.clear()
            batch = service.take_batch()
            assert batch is not None, "no drain was begun"
            train_step.step(batch, policy_version=version - 1)
            service.commit(version, train_step.team.gather_weights, evaluate=False)
            while service.call(broadcaster.statistics).versions != {"w": version}:
                assert not ended.wait(0.01), "the worker stopped"
        ran = set(files)
        worker.close()
        engine.close()
        service.close()
    return ran


async def _work(
    config: Config, engine: EmbeddedEngine, chat: ChatFormat, stops: tuple[int, ...], address: Address
) -> None:
    rewards = await make_scoring(config)
    channel = make_channel(address)
    worker = make_worker(config, engine, channel, SingleTurn(), rewards, chat, stops)
    try:
        await worker.run()
    finally:
        await rewards.close()
        channel.close()


@contextmanager
def _tracing() -> Iterator[set[str]]:
    """Collect the files of the package whose functions are called, on this thread and on threads begun meanwhile."""
    files: set[str] = set()
    prefix = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(prefix) and frame.f_code.co_name != "<module>":
            files.add(name.removeprefix(prefix))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
