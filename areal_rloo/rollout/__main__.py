"""`python -m areal_rloo.rollout`: builds the rollout worker of a run folder and runs it. Started by a launcher.

Exit codes: 0 drained or stopped, 2 a mistake the user can mend, 4 the learner went back to a version before ours, 1
anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import uuid
from pathlib import Path

import msgspec
import torch
from prometheus_client import CollectorRegistry

from areal_rloo.config import Config, import_entry, load_config
from areal_rloo.engines.base import Engine
from areal_rloo.errors import EXIT_WENT_BACK, WentBackError
from areal_rloo.models.files import load_tokenizer, model_folder, stop_token_ids
from areal_rloo.rewards.scoring import Scoring
from areal_rloo.rollout.engines import WorkerEngine, make_engine
from areal_rloo.rollout.episode import Episode
from areal_rloo.rollout.episodes import make_episode, serving
from areal_rloo.rollout.scoring import make_scoring
from areal_rloo.rollout.worker import RolloutWorker
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.tasks.tools import tool_schemas
from areal_rloo.telemetry.logs import get_logger, run_to_exit_code, setup_logs
from areal_rloo.telemetry.metrics import RolloutMetrics, serve_metrics, watch
from areal_rloo.telemetry.tables import RECEIVE, WIRE
from areal_rloo.weights.receive import Receiver
from areal_rloo.wire.channels import WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.security import load_keys

logger = get_logger(__name__)

_METRICS_EVERY_S = 1.0


class Arguments(argparse.Namespace):
    """The command line."""

    run_folder: Path
    model_path: str
    worker_id: str
    address: str
    device: str
    num_threads: int
    metrics_port: int
    server_url: str | None


def main() -> int:
    """Run the worker; errors the user can mend are one line."""
    arguments = _parse()
    torch.set_num_threads(arguments.num_threads)
    config = load_config(str(arguments.run_folder / "config.yaml"))
    setup_logs(
        arguments.worker_id,
        level=config.telemetry.log_level,
        file=arguments.run_folder / "logs" / f"{arguments.worker_id}.log",
    )
    return run_to_exit_code(lambda: _run(config, arguments))


def _run(config: Config, arguments: Arguments) -> int:
    try:
        asyncio.run(_generate(config, arguments))
    except WentBackError as error:
        logger.warning("%s", error)
        return EXIT_WENT_BACK
    logger.info("done")
    return 0


async def _generate(config: Config, arguments: Arguments) -> None:
    import_entry(config.run.entry)
    tokenizer = load_tokenizer(arguments.model_path)
    worker: RolloutWorker | None = None

    def on_weights_lost() -> None:
        if worker is not None:
            worker.on_weights_lost()

    made = make_engine(
        config,
        model_folder(arguments.model_path),
        worker_id=arguments.worker_id,
        device=torch.device(arguments.device),
        num_threads=arguments.num_threads,
        server_url=arguments.server_url,
        logs=arguments.run_folder / "logs",
        on_weights_lost=on_weights_lost,
    )
    try:
        await made.until_ready()
        incarnation = uuid.uuid4().hex
        channel = _channel(config, arguments, incarnation)
        rewards = await make_scoring(config)
        episode = make_episode(config)
        worker = RolloutWorker(
            config,
            worker_id=arguments.worker_id,
            incarnation=incarnation,
            channel=channel,
            engine=made.engine,
            episode=episode,
            rewards=rewards,
            chat=ChatFormat(tokenizer, config.data, tools=tool_schemas(config.rollout.episode)),
            stop_token_ids=stop_token_ids(arguments.model_path, tokenizer),
        )
        await _serve(worker, made, episode, rewards, channel, arguments, config.telemetry.metrics_host)
    finally:
        made.engine.close()


async def _serve(
    worker: RolloutWorker,
    made: WorkerEngine,
    episode: Episode,
    rewards: Scoring,
    channel: WorkerChannel,
    arguments: Arguments,
    metrics_host: str,
) -> None:
    """Run the worker to its end, with weights coming in and metrics going out."""
    engine = made.engine
    receiver = Receiver(
        worker_id=arguments.worker_id,
        policy_version=lambda: engine.statistics().policy_version,
        load_weights=engine.load_weights,
        join_group=made.join_group,
        on_received=worker.on_weights_received,
        on_failed=worker.on_weights_failed,
        device=made.device,
    )
    worker.attach(receiver)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # the last is what Slurm passes on to a step
        loop.add_signal_handler(number, worker.stop)
    registry = CollectorRegistry()
    made.watch(registry)
    metrics = asyncio.create_task(
        _publish_metrics(engine, channel, receiver, rewards, registry, (metrics_host, arguments.metrics_port))
    )
    logger.info("ready on %s with %d threads", arguments.device, arguments.num_threads)
    try:
        async with serving(episode):
            await worker.run()
    finally:
        metrics.cancel()
        receiver.close()
        await rewards.close()
        await channel.close()


def _channel(config: Config, arguments: Arguments, incarnation: str) -> WorkerChannel:
    return WorkerChannel(
        arguments.address,
        worker_id=arguments.worker_id,
        incarnation=incarnation,
        limits=Limits(max_message_bytes=config.wire.max_message_bytes),
        max_unacked=config.wire.max_unacked,
        keys=load_keys(arguments.run_folder / "keys", end="worker") if config.curve else None,
    )


async def _publish_metrics(
    engine: Engine,
    channel: WorkerChannel,
    receiver: Receiver,
    rewards: Scoring,
    registry: CollectorRegistry,
    address: tuple[str, int],
) -> None:
    metrics = RolloutMetrics(registry)
    watch(registry, WIRE, lambda: msgspec.structs.asdict(channel.statistics()))
    watch(registry, RECEIVE, lambda: msgspec.structs.asdict(receiver.statistics()))
    host, port = address
    served, _ = serve_metrics(registry, port, address=host)
    logger.info("metrics on http://%s:%d/metrics", host, served)
    while True:
        statistics, scoring = engine.statistics(), rewards.statistics()
        metrics.update(
            {
                "policy_version": statistics.policy_version,
                "num_running": statistics.num_running,
                "num_waiting": statistics.num_waiting,
                "unacknowledged": channel.statistics().unacknowledged,
                "generated_tokens": statistics.generated_tokens,
                "prefill_tokens": statistics.prefill_tokens,
                "cached_tokens": statistics.cached_tokens,
                "num_preempted": statistics.num_preempted,
                "weight_updates": statistics.weight_updates,
                "idle_s": statistics.idle_s,
                "swap_s": statistics.swap_s,
                "scored": scoring.scored,
                "reward_restarts": scoring.restarts,
                "reward_busy_s": scoring.busy_s,
            },
            scoring.dropped,
        )
        await asyncio.sleep(_METRICS_EVERY_S)


def _parse() -> Arguments:
    parser = argparse.ArgumentParser(prog="python -m areal_rloo.rollout")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("--server-url")
    return parser.parse_args(namespace=Arguments())


if __name__ == "__main__":
    sys.exit(main())
