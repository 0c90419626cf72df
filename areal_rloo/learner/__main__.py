"""`python -m areal_rloo.learner`: builds the learner of a run folder and runs it. Started by a launcher.

Exit codes: 0 done or drained, 2 a mistake the user can mend, 3 another rank of the learner ended, 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
import torch
from prometheus_client import CollectorRegistry
from transformers import PreTrainedTokenizerBase

from areal_rloo.config import Config, import_entry, import_function, load_config
from areal_rloo.errors import EXIT_RANK_LOST, CheckpointError
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import Checkpoints, LearnerState, Totals, read_state, restore_ledger
from areal_rloo.learner.evaluation import EvalSet, Evaluation
from areal_rloo.learner.intake import Intake
from areal_rloo.learner.ledger import Ledger
from areal_rloo.learner.lock import DEAD_HOST_S, Patience, lock_run_folder
from areal_rloo.learner.parallel import RankLostError, Ranks
from areal_rloo.learner.prompts import Prompt, PromptStream, Tokenizer
from areal_rloo.learner.rank import LearnerRank, follow
from areal_rloo.learner.recording import Recorder
from areal_rloo.learner.team import Team
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.learner.worker import Learner, Reporter, write_summary
from areal_rloo.models.files import load_tokenizer, model_folder, stop_token_ids
from areal_rloo.tasks import load_eval, load_train
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.tasks.tools import tool_schemas
from areal_rloo.telemetry.logs import get_logger, run_to_exit_code, setup_logs
from areal_rloo.telemetry.metrics import LearnerMetrics, MetricsFile, read_records, serve_metrics, watch
from areal_rloo.telemetry.records import EvalRecord
from areal_rloo.telemetry.tables import BROADCAST, WIRE
from areal_rloo.telemetry.trajectories import FILE_NAME, cut_trajectories
from areal_rloo.trajectory import Group
from areal_rloo.weights.broadcast import Broadcaster, SendTransport
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.shared_memory import SharedMemorySender
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.security import load_keys

logger = get_logger(__name__)

_LAUNCHER_FIRST_S = 5.0  # it says why it ends a learner that takes too long


class Arguments(argparse.Namespace):
    """The command line."""

    run_folder: Path
    model_path: str
    device: str
    num_threads: int
    rank: int
    meeting: str
    port: int
    metrics_port: int
    segment_folder: Path
    same_host: bool
    resume: bool
    warm_start_s: float


def main() -> int:
    """Run the learner; errors the user can mend are one line."""
    arguments = _parse()
    torch.set_num_threads(arguments.num_threads)
    config = load_config(str(arguments.run_folder / "config.yaml"))
    name = "learner" if arguments.rank == 0 else f"learner-{arguments.rank}"
    setup_logs(name, level=config.telemetry.log_level, file=arguments.run_folder / "logs" / f"{name}.log")
    return run_to_exit_code(lambda: _run(config, arguments))


def _run(config: Config, arguments: Arguments) -> int:
    import_entry(config.run.entry)
    torch.manual_seed(config.run.seed)
    device = torch.device(arguments.device)
    ranks = _meet(config, arguments, device)
    if ranks.rank == 0:
        return _lead(config, arguments, ranks)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains, and needs all ranks for its last checkpoint
    try:
        checkpoint = ranks.take().decode()
        follow(_built(config, arguments, ranks, Path(checkpoint) if checkpoint else None))
    except RankLostError as error:
        logger.error("%s", error)
        return EXIT_RANK_LOST
    ranks.close()
    return 0


def _built(config: Config, arguments: Arguments, ranks: Ranks, checkpoint: Path | None) -> LearnerRank:
    """This rank, as a checkpoint has it where there is one; every rank calls it at the same time."""
    device = torch.device(arguments.device)
    rank = build_rank(config, model_path=arguments.model_path, device=device, ranks=ranks)
    if checkpoint is not None:
        num_optimizer_steps = read_state(checkpoint).num_optimizer_steps
        rank.load(checkpoint / "shards", num_optimizer_steps=num_optimizer_steps)
    return rank


def _meet(config: Config, arguments: Arguments, device: torch.device) -> Ranks:
    learner = config.learner
    if learner.num_ranks == 1 and learner.offload != "parameters":
        return Ranks()
    return Ranks.meet(
        arguments.meeting,
        rank=arguments.rank,
        num=learner.num_ranks,
        device=device,
        timeout_s=learner.collective_timeout_s,
    )


def _lead(config: Config, arguments: Arguments, ranks: Ranks) -> int:
    folder = arguments.run_folder
    lock_run_folder(folder, "learner", Patience(DEAD_HOST_S, logger.warning))
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep)
    restored = checkpoints.load_newest() if arguments.resume else None
    if arguments.resume and restored is None:
        logger.warning("there is no checkpoint in %s: starting from the beginning", folder)
    if restored is not None:
        _check_seed(config, *restored)
    tokenizer = load_tokenizer(arguments.model_path)
    # What a hub has comes before the others are let go: they wait for each other no longer than for any collective.
    model_folder(arguments.model_path)
    ranks.hand_out([str(restored[0]).encode() if restored is not None else b""] * (ranks.num - 1))
    rank = _built(config, arguments, ranks, None if restored is None else restored[0])
    stops = stop_token_ids(arguments.model_path, tokenizer)
    train_step = TrainStep(Team(rank), config, stop_token_ids=stops)
    tokenize = Tokenizer(ChatFormat(tokenizer, config.data, tools=tool_schemas(config.rollout.episode)), config.data)
    sources = load_train(config.data, seed=config.run.seed)
    stream = PromptStream(sources, tokenize, seed=config.run.seed, num_epochs=config.data.num_epochs)
    ledger, totals, policy_version = Ledger(), Totals(), 0
    if restored is not None:
        ledger, totals, policy_version = _restore(restored, train_step, stream)
    registry = CollectorRegistry()
    reporter = _reporter(folder, policy_version, registry, fresh=restored is None)
    evaluation = Evaluation(_eval_sets(config, tokenize), reporter.evaluation)
    intake = Intake(
        config,
        channel=_channel(config, arguments),
        ledger=ledger,
        stream=stream,
        evaluation=evaluation,
        policy_version=policy_version,
        group_filter=_group_filter(config),
        num_truncated=lambda: tokenize.num_truncated,
    )
    broadcaster = _broadcaster(config, arguments, rank, intake)
    # Version 0 too: a server that is not ours may have any weights.
    broadcaster.publish(policy_version, train_step.team.gather_weights)
    intake.start()
    intake.attach(broadcaster)
    _serve_metrics(registry, config.telemetry.metrics_host, arguments.metrics_port, intake, broadcaster)
    _drain_on_signals(intake, config.launcher.drain_timeout_s + _LAUNCHER_FIRST_S)
    learner = Learner(
        config,
        train_step=train_step,
        tokenizer=tokenizer,
        intake=intake,
        broadcaster=broadcaster,
        reporter=reporter,
        recorder=_recorder(config, folder, tokenizer, policy_version, fresh=restored is None),
        checkpoints=checkpoints,
        policy_version=policy_version,
        totals=totals,
    )
    measured = {record.name for record in reporter.evaluations if record.policy_version == policy_version}
    if not measured.issuperset(source.label for source in config.data.eval_sources):
        intake.advance(policy_version, evaluate=True)
    _run_to_the_end(learner, intake, broadcaster, arguments, config)
    train_step.team.stop()
    ranks.close()
    return 0


def _group_filter(config: Config) -> Callable[[Group], bool] | None:
    path = config.algorithm.group_filter
    return None if path is None else import_function("algorithm.group_filter", path)


def _run_to_the_end(
    learner: Learner, intake: Intake, broadcaster: Broadcaster, arguments: Arguments, config: Config
) -> None:
    """Train, and write the summary, whatever happens.

    The workers are stopped where the run ends; a learner that fails may begin anew, and they go on until it does.
    """
    reason = "failed"
    try:
        reason = learner.run()
        intake.stop_workers(config.launcher.drain_timeout_s / 4)
    finally:
        learner.close()
        try:
            write_summary(
                arguments.run_folder / "summary.json",
                learner=learner,
                statistics=intake.statistics(),
                warm_start_s=arguments.warm_start_s,
                exit_reason=reason,
            )
        except OSError as error:  # a full disk; what ended the run is to be said, not this
            logger.error("summary.json could not be written: %s", error)
        broadcaster.close()
        intake.close()
    logger.info("the learner is done: %s at version %d", reason, learner.policy_version)


def _channel(config: Config, arguments: Arguments) -> Callable[[], LearnerChannel]:
    keys = load_keys(arguments.run_folder / "keys", end="learner") if config.curve else None
    limits = Limits(max_message_bytes=config.wire.max_message_bytes)
    return lambda: LearnerChannel.bind(config.wire.host, arguments.port, limits=limits, keys=keys)


def _eval_sets(config: Config, tokenize: Tokenizer) -> list[EvalSet]:
    sets = []
    for source, settings in zip(load_eval(config.data, seed=config.run.seed), config.data.eval_sources, strict=True):
        num_truncated = tokenize.num_truncated
        tokenized = [(index, tokenize(item), item) for index, item in enumerate(source.items)]
        prompts = [Prompt(0, index, tokens, item) for index, tokens, item in tokenized if tokens is not None]
        if tokenize.num_truncated > num_truncated:
            logger.warning(
                "evaluation on %s cuts %d prompts to their end", source.label, tokenize.num_truncated - num_truncated
            )
        if len(prompts) < len(tokenized):
            num_filtered = len(tokenized) - len(prompts)
            logger.warning(
                "evaluation on %s leaves out %d of %d prompts for their length",
                source.label,
                num_filtered,
                len(tokenized),
            )
        sets.append(EvalSet(source.label, prompts, settings.num_samples))
    return sets


def _check_seed(config: Config, path: Path, state: LearnerState) -> None:
    if state.seed != config.run.seed:
        raise CheckpointError(
            f"run.seed: expected {state.seed}, with which {path} was made, got {config.run.seed}; another seed has "
            "another order of prompts"
        )


def _restore(
    restored: tuple[Path, LearnerState], train_step: TrainStep, stream: PromptStream
) -> tuple[Ledger, Totals, int]:
    path, state = restored
    train_step.kl_coefficient = state.kl_coefficient
    logger.info("resuming from %s at version %d", path, state.policy_version)
    return restore_ledger(state, stream), state.totals, state.policy_version


def _reporter(folder: Path, policy_version: int, registry: CollectorRegistry, *, fresh: bool) -> Reporter:
    """Open metrics.jsonl; on a resume, what came after the checkpoint did not happen and is cut off."""
    path = folder / "metrics.jsonl"
    records = [] if fresh else [r for r in read_records(path) if r.policy_version <= policy_version]
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    evaluations = [record for record in records if isinstance(record, EvalRecord)]
    return Reporter(MetricsFile(path), LearnerMetrics(registry), evaluations)


def _recorder(
    config: Config, folder: Path, tokenizer: PreTrainedTokenizerBase, policy_version: int, *, fresh: bool
) -> Recorder:
    """Open trajectories.jsonl; on a resume, what came after the checkpoint did not happen and is cut off."""
    path = folder / FILE_NAME
    if fresh:
        path.unlink(missing_ok=True)
    else:
        cut_trajectories(path, policy_version - 1)  # records have the version before their step
    return Recorder(path, tokenizer, trajectories_per_step=config.telemetry.trajectories_per_step)


def _broadcaster(config: Config, arguments: Arguments, rank: LearnerRank, intake: Intake) -> Broadcaster:
    manifest = rank.manifest
    transport: SendTransport
    if config.weights_transport(same_host=arguments.same_host) == "shared_memory":
        transport = SharedMemorySender(manifest, arguments.segment_folder)
    else:
        transport = CollectiveSender(
            manifest,
            host=config.wire.host,
            device=torch.device("cpu" if config.rollout.device == "cpu" else arguments.device),
            timeout_s=config.weights.timeout_s,
            ranks_per_worker=config.rollout.tensor_parallel,
        )
    return Broadcaster(
        manifest=manifest, transport=transport, timeout_s=config.weights.timeout_s, send_notice=intake.send_notice
    )


def _serve_metrics(registry: CollectorRegistry, host: str, port: int, intake: Intake, broadcaster: Broadcaster) -> None:
    watch(registry, WIRE, lambda: msgspec.structs.asdict(intake.wire_statistics()))
    watch(registry, BROADCAST, lambda: msgspec.structs.asdict(broadcaster.statistics()))
    served, _ = serve_metrics(registry, port, address=host)
    logger.info("metrics on http://%s:%d/metrics", host, served)


def _drain_on_signals(intake: Intake, timeout_s: float) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        if intake.draining:
            return  # Slurm tells each process and so does the launcher, which also ends one that takes too long
        logger.info("signal %d: draining", number)
        intake.begin_drain()
        deadline = threading.Timer(timeout_s, os._exit, [128 + number])  # where the launcher itself is gone
        deadline.daemon = True
        deadline.start()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # the last is what Slurm passes on to a step
        signal.signal(number, handle)


def _parse() -> Arguments:
    parser = argparse.ArgumentParser(prog="python -m areal_rloo.learner")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meeting", default="", help="host:port where the learner's ranks meet")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("--segment-folder", type=Path, required=True)
    parser.add_argument("--same-host", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--warm-start-s", type=float, default=0.0)
    return parser.parse_args(namespace=Arguments())


if __name__ == "__main__":
    sys.exit(main())
