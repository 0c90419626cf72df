"""`python -m areal_rloo.rollout`: build the rollout worker of a run folder and run it. A launcher starts this.

Exit codes: 0 drained or stopped, 2 a mistake the user can mend, found before the first completion, 4 the learner
restarted from a version older than this worker's weights, 1 anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import signal
import uuid
from pathlib import Path

from areal_rloo.program import begin_imports, end_imports

if __name__ == "__main__":
    begin_imports()

import torch
from prometheus_client import CollectorRegistry

from areal_rloo.config import Config, import_entry, load_config
from areal_rloo.engines.base import Engine, EngineStatistics
from areal_rloo.errors import EXIT_WENT_BACK, ArealRlooError, UserError, WentBackError
from areal_rloo.models.files import load_tokenizer, policy_folder, stop_token_ids
from areal_rloo.models.stored import digest_of_files
from areal_rloo.rewards import make_scoring
from areal_rloo.rewards.request import RewardStatistics
from areal_rloo.rollout.deadline import EpisodeStatistics
from areal_rloo.rollout.engines import WorkerEngine, running_engine
from areal_rloo.rollout.episode_types import make_episode, serving
from areal_rloo.rollout.protocol import ProtocolStatistics
from areal_rloo.rollout.worker import RolloutWorker
from areal_rloo.standard_streams import open_missing_streams
from areal_rloo.tasks.chat import chat_format
from areal_rloo.telemetry.logs import get_logger, run_to_exit_code, setup_logs
from areal_rloo.telemetry.metrics import watch
from areal_rloo.telemetry.scrapes import serve_process
from areal_rloo.telemetry.stacks import show_on_signal
from areal_rloo.telemetry.trace import traced
from areal_rloo.telemetry.watchdog import Watchdog, WatchdogStatistics
from areal_rloo.waiting import exit_despite_threads, run_beside_user_code
from areal_rloo.weights.receive import Receiver, ReceiveStatistics
from areal_rloo.wire.address import read_address
from areal_rloo.wire.channels import WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.counts import ChannelStatistics

logger = get_logger(__name__)

_LATE_RECEIVE = 10  # times the deadline of the learner: reported


class Arguments(argparse.Namespace):
    """The command line."""

    run_folder: Path
    model_path: str
    worker_id: str
    wire: str
    device: str
    num_threads: int
    metrics_port: int
    server_url: str | None


def main() -> int:
    """Run the worker; an error that the user can mend is a single line."""
    open_missing_streams()
    end_imports()
    show_on_signal()
    arguments = _parse()
    torch.set_num_threads(arguments.num_threads)
    config = load_config(str(arguments.run_folder / "config.yaml"))
    setup_logs(
        arguments.worker_id,
        level=config.telemetry.log_level,
        file=arguments.run_folder / "logs" / f"{arguments.worker_id}.log",
    )
    with traced(arguments.run_folder, arguments.worker_id, on=config.telemetry.trace):
        return run_to_exit_code(lambda: _run(config, arguments))


def _run(config: Config, arguments: Arguments) -> int:
    try:
        run_beside_user_code(_generate(config, arguments, policy_folder(arguments.model_path, config)))
    except WentBackError as error:
        logger.warning("%s", error)
        return EXIT_WENT_BACK
    logger.info("done")
    return 0


async def _generate(config: Config, arguments: Arguments, folder: Path) -> None:
    import_entry(config.run.entry)
    tokenizer = load_tokenizer(str(folder))
    incarnation = uuid.uuid4().hex
    async with running_engine(
        config,
        folder,
        worker_id=arguments.worker_id,
        device=torch.device(arguments.device),
        num_threads=arguments.num_threads,
        server_url=arguments.server_url,
        run_folder=arguments.run_folder,
    ) as running:
        engine = running.engine
        channel = _channel(config, arguments, incarnation)
        rewards = await make_scoring(config)
        episode = make_episode(config)
        receiver = await _receiver(config, arguments, folder, running)
        worker = RolloutWorker(
            config,
            worker_id=arguments.worker_id,
            incarnation=incarnation,
            channel=channel,
            engine=engine,
            receiver=receiver,
            episode=episode,
            rewards=rewards,
            chat=chat_format(tokenizer, config),
            stop_token_ids=stop_token_ids(str(folder), tokenizer),
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # Slurm passes USR1 on to a step
            asyncio.get_running_loop().add_signal_handler(number, worker.stop)
        registry = CollectorRegistry()
        watchdog = _watchdog(config, engine, receiver)
        watch(registry, WatchdogStatistics, watchdog.statistics)
        running.watch(registry)
        watch(registry, EngineStatistics, engine.statistics)
        watch(registry, RewardStatistics, rewards.statistics)
        watch(registry, ChannelStatistics, channel.statistics)
        watch(registry, ReceiveStatistics, receiver.statistics)
        watch(registry, ProtocolStatistics, worker.statistics)
        watch(registry, EpisodeStatistics, worker.episodes)
        run_folder, name = arguments.run_folder, arguments.worker_id
        targets = serve_process(registry, config, run_folder, process=name, port=arguments.metrics_port)
        gc.collect()
        gc.freeze()  # else a collection looks at all that is loaded, for 0.1 s, in which the loop stands still
        logger.info("ready on %s with %d threads", arguments.device, arguments.num_threads)
        try:
            async with serving(episode):
                with watchdog:
                    await worker.run()
            targets.remove(arguments.worker_id)
        except UserError as error:
            if engine.statistics().generated_tokens == 0:
                raise
            raise ArealRlooError(f"after a good start: {error}") from error  # the environment has changed: a crash
        finally:
            await rewards.close()
            channel.close()


async def _receiver(config: Config, arguments: Arguments, folder: Path, running: WorkerEngine) -> Receiver:
    base = (await asyncio.to_thread(digest_of_files, folder), folder) if config.publishes_adapters else None
    return Receiver(
        worker_id=arguments.worker_id,
        policy_version=lambda: running.engine.statistics().policy_version,
        load_weights=running.load_weights,
        join_group=running.join_group,
        device=running.device,
        base=base,
    )


def _watchdog(config: Config, engine: Engine, receiver: Receiver) -> Watchdog:
    """Watch this worker's loop, its embedded engine, and the receive of weights. A server has watches of its own."""
    watchdog, deadline_s = Watchdog(), config.launcher.hang_timeout_s or math.inf

    def progress() -> object:
        """Return counts that grow while the engine decodes; None if no completion is being decoded."""
        now = engine.statistics()
        return (now.decode_steps, now.prefill_tokens, now.weight_updates) if now.num_running else None

    read = watchdog.watch_loop("the event loop", asyncio.get_running_loop(), deadline_s, look=progress)
    if config.rollout.engine == "embedded":
        watchdog.watch("the engine, which has requests,", read, deadline_s, essential=True)
    late_s = max(_LATE_RECEIVE * config.weights.timeout_s, deadline_s)
    watchdog.watch("the receive of weights", receiver.under_way, late_s, essential=False)
    return watchdog


def _channel(config: Config, arguments: Arguments, incarnation: str) -> WorkerChannel:
    return WorkerChannel(
        read_address(arguments.wire, keys=arguments.run_folder / "keys", end="worker"),
        worker_id=arguments.worker_id,
        incarnation=incarnation,
        limits=Limits(max_message_bytes=config.wire.max_message_bytes),
    )


def _parse() -> Arguments:
    parser = argparse.ArgumentParser(prog="python -m areal_rloo.rollout")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--wire", required=True, help="the learner's address (wire/address.py)")
    parser.add_argument("--device", required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("--server-url")
    return parser.parse_args(namespace=Arguments())


if __name__ == "__main__":
    exit_despite_threads(main())
