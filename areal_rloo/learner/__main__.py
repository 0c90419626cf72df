"""`python -m areal_rloo.learner`: build the learner of a run folder and run it. A launcher starts this.

Exit codes: 0 done or drained, 2 a mistake the user can mend, 3 another rank of the learner ended, 5 the disk refused
the last checkpoint, 1 anything else.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from areal_rloo.program import begin_imports, end_imports

if __name__ == "__main__":
    begin_imports()

import torch
from prometheus_client import CollectorRegistry
from transformers import PreTrainedTokenizerBase

from areal_rloo.config import Config, dump_config, import_entry, load_config
from areal_rloo.errors import EXIT_RANK_LOST
from areal_rloo.files import remove_unfinished
from areal_rloo.intake.curriculum import load_curriculum
from areal_rloo.intake.eval_sets import eval_sets
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import FleetStatistics
from areal_rloo.intake.group_filter import load_group_filter
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies, LieStatistics
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.service import IntakeService
from areal_rloo.learner.batches import BatchRecorder, Start, cut_batches, software
from areal_rloo.learner.batches import folder_of as batches_of
from areal_rloo.learner.building import build_broadcaster, build_rank
from areal_rloo.learner.checkpoint import Checkpoints, read_state
from areal_rloo.learner.checkpoint_folder import CheckpointStatistics, checkpoint_statistics, folder_of
from areal_rloo.learner.collector import collect_rarely
from areal_rloo.learner.lock import DEAD_HOST_S, Patience, lock_run_folder
from areal_rloo.learner.loop import Learner
from areal_rloo.learner.parallel.ranks import RankLostError, Ranks
from areal_rloo.learner.rank import LearnerRank
from areal_rloo.learner.recording import Recorder
from areal_rloo.learner.reporting import PaceStatistics, Reporter, records_so_far
from areal_rloo.learner.resuming import check_model, newest_checkpoint, restored_ledger
from areal_rloo.learner.state import Totals
from areal_rloo.learner.stretches import begin_stretch, breaks_of
from areal_rloo.learner.team import Team, follow
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.learner.turn import turn_of_learner
from areal_rloo.models.device import grow_segments
from areal_rloo.models.files import load_tokenizer, policy_folder, stop_token_ids
from areal_rloo.standard_streams import open_missing_streams
from areal_rloo.tasks import load_train
from areal_rloo.tasks.chat import Tokenizer, chat_format
from areal_rloo.telemetry.health import Health, HealthStatistics
from areal_rloo.telemetry.logs import get_logger, run_to_exit_code, setup_logs
from areal_rloo.telemetry.metrics import MetricsFile, watch
from areal_rloo.telemetry.own_code import own_code, own_code_lines
from areal_rloo.telemetry.record_file import cut_records
from areal_rloo.telemetry.scrapes import serve_process
from areal_rloo.telemetry.stacks import show_on_signal
from areal_rloo.telemetry.summary import SUMMARY_NAME, forget_earlier_summary
from areal_rloo.telemetry.trace import traced
from areal_rloo.telemetry.trajectories import FILE_NAME
from areal_rloo.telemetry.wanted import LauncherStatistics, read_wanted
from areal_rloo.telemetry.watchdog import Watchdog, WatchdogStatistics
from areal_rloo.waiting import exit_despite_calls
from areal_rloo.weights.broadcast import Broadcaster
from areal_rloo.weights.counts import BroadcastStatistics
from areal_rloo.wire.address import read_address
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.counts import ChannelStatistics
from areal_rloo.wire.messages import History

logger = get_logger(__name__)

_LAUNCHER_FIRST_S = 5.0  # the launcher ends a slow learner first, and says why
_LONG_STEP_S = 3600.0  # a first step may compile; after half an hour, the log has the stacks
_SCRAPE_S = 1.0  # a hung event loop must not hide the watchdog's metric: a scrape waits four times, 5 s at most
_DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # Slurm passes USR1 on to a step


class Arguments(argparse.Namespace):
    """The command line."""

    run_folder: Path
    model_path: str
    device: str
    num_threads: int
    rank: int
    meeting: str
    wire: str
    metrics_port: int
    same_host: bool
    resume: bool
    warm_start_s: float


def main() -> int:
    """Run the learner; an error that the user can mend is a single line."""
    open_missing_streams()
    end_imports()
    show_on_signal()
    arguments = _parse()
    torch.set_num_threads(arguments.num_threads)
    config = load_config(str(arguments.run_folder / "config.yaml"))
    name = "learner" if arguments.rank == 0 else f"learner-{arguments.rank}"
    setup_logs(name, level=config.telemetry.log_level, file=arguments.run_folder / "logs" / f"{name}.log")
    with traced(arguments.run_folder, name, on=config.telemetry.trace):
        code = run_to_exit_code(lambda: _run(config, arguments, name))
    _on_signals(signal.SIG_IGN)  # Python restores the defaults when it ends; a signal would then replace the exit code
    return code


def _run(config: Config, arguments: Arguments, name: str) -> int:
    for line in own_code_lines(own_code(config)):
        logger.info("%s", line)
    import_entry(config.run.entry)
    grow_segments(torch.device(arguments.device))
    torch.manual_seed(config.run.seed)
    settings, ranks = config.learner, Ranks()
    if settings.num_ranks > 1 or settings.offload == "parameters":
        ranks = Ranks.meet(
            arguments.meeting,
            rank=arguments.rank,
            num=settings.num_ranks,
            device=torch.device(arguments.device),
            timeout_s=settings.collective_timeout_s,
        )
    if ranks.rank == 0:
        learner, watchdog = _learner(config, arguments, ranks)
        with watchdog:
            _lead(learner, arguments)
    else:
        _on_signals(signal.SIG_IGN)  # rank 0 drains, and needs all ranks for the last checkpoint
        try:
            serve_process(CollectorRegistry(), config, arguments.run_folder, process=name, port=0, essential=False)
            checkpoint = bytes(ranks.take()).decode()
            follow(_built(config, arguments, ranks, Path(checkpoint) if checkpoint else None))
        except RankLostError as error:
            logger.error("%s", error)
            return EXIT_RANK_LOST
    ranks.close()
    return 0


def _built(config: Config, arguments: Arguments, ranks: Ranks, checkpoint: Path | None) -> LearnerRank:
    """Build this rank, from a checkpoint if there is any; all ranks do so at the same time."""
    device, resumes = torch.device(arguments.device), checkpoint is not None
    rank = build_rank(config, model_path=arguments.model_path, device=device, ranks=ranks, resumes=resumes)
    if checkpoint is not None:
        rank.load(checkpoint / "shards", num_optimizer_steps=read_state(checkpoint).num_optimizer_steps)
    return rank


def _learner(config: Config, arguments: Arguments, ranks: Ranks) -> tuple[Learner, Watchdog]:
    """Build all parts of the learner on rank 0, and start the intake. The watchdog watches both of its threads."""
    folder = arguments.run_folder
    lock_run_folder(folder, "learner", Patience(DEAD_HOST_S, logger.warning))
    remove_unfinished(folder / SUMMARY_NAME)
    checkpoints = Checkpoints(folder_of(folder))
    restored = newest_checkpoint(checkpoints, config, resume=arguments.resume)
    # Download before the ranks meet: they wait no longer than for a collective.
    model_path = str(policy_folder(arguments.model_path, config))
    tokenizer = load_tokenizer(model_path)
    ranks.hand_out([bytearray("" if restored is None else str(restored[0]), "utf-8")] * (ranks.num - 1))
    rank = _built(config, arguments, ranks, None if restored is None else restored[0])
    train_step = TrainStep(Team(rank), config, stop_token_ids=stop_token_ids(model_path, tokenizer))
    tokenize = Tokenizer(chat_format(tokenizer, config), config.data)
    stream = _stream(config, tokenize)
    ledger, totals, policy_version = Ledger(), Totals(), 0
    history: History = ()
    if restored is not None:
        state = restored[1]
        totals, policy_version, history = state.totals, state.policy_version, state.history
        check_model(state, config, Path(model_path), rank.base)
        rank.base = state.base
        ledger = restored_ledger(restored, stream, config)
        train_step.resume(state.kl_coefficient)
    registry = CollectorRegistry()
    reporter = _reporter(config, folder, -1 if restored is None else policy_version, registry, totals, checkpoints)
    device = torch.device(arguments.device)
    broadcaster = build_broadcaster(config, rank, device=device, same_host=arguments.same_host)
    intake = Intake(
        config,
        ledger=ledger,
        stream=stream,
        evaluation=Evaluation(eval_sets(config, tokenize), reporter.evaluation),
        offers=broadcaster.offers,
        policy_version=policy_version,
        history=(*history, (uuid.uuid4().hex, policy_version)),
        lies=Lies(config, vocab_size=int(rank.policy.causal.config.vocab_size)),
        group_filter=load_group_filter(config.algorithm.group_filter),
        num_truncated=lambda: tokenize.num_truncated,
    )
    reporter.follow(intake.statistics(), lambda: service.call(intake.statistics, timeout_s=_SCRAPE_S))
    service = IntakeService(intake, broadcaster, _channel(config, arguments), heartbeat_s=config.wire.heartbeat_s)
    watchdog = Watchdog()
    _serve_metrics(config, arguments, registry, service, broadcaster, watchdog)
    _drain_on_signals(service, config.launcher.drain_timeout_s + _LAUNCHER_FIRST_S)
    learner = Learner(
        config=config,
        train_step=train_step,
        tokenizer=tokenizer,
        intake=service,
        broadcaster=broadcaster,
        reporter=reporter,
        recorder=_recorder(config, folder, tokenizer, policy_version),
        batches=_batches(config, arguments, policy_version),
        checkpoints=checkpoints,
        turn=turn_of_learner(config, folder, train_step.team, service, registry),
        policy_version=policy_version,
    )
    service.watch(watchdog, config.launcher.hang_timeout_s or math.inf)
    watchdog.watch("the training thread", lambda: learner.doing, _LONG_STEP_S, essential=False)
    return learner, watchdog


def _stream(config: Config, tokenize: Tokenizer) -> PromptStream:
    seed, num_epochs = config.run.seed, config.data.num_epochs
    sources = tokenize.checked(load_train(config.data, seed=seed, most_item_bytes=config.wire.most_item_bytes))
    curriculum = load_curriculum(config, [source.items for source in sources])
    return PromptStream(sources, tokenize, seed=seed, num_epochs=num_epochs, curriculum=curriculum)


def _serve_metrics(
    config: Config,
    arguments: Arguments,
    registry: CollectorRegistry,
    service: IntakeService,
    broadcaster: Broadcaster,
    watchdog: Watchdog,
) -> None:
    watch(registry, ChannelStatistics, service.channel.statistics)
    watch(registry, LieStatistics, lambda: service.call(service.lies.statistics, timeout_s=_SCRAPE_S))
    fleet = lambda: service.fleet.statistics(time.monotonic())  # noqa: E731
    watch(registry, FleetStatistics, lambda: service.call(fleet, timeout_s=_SCRAPE_S))
    watch(registry, BroadcastStatistics, lambda: service.call(broadcaster.statistics, timeout_s=_SCRAPE_S))
    watch(registry, WatchdogStatistics, watchdog.statistics)
    watch(registry, LauncherStatistics, lambda: read_wanted(arguments.run_folder, config.rollout.num_workers))
    checkpoints, every = folder_of(arguments.run_folder), config.checkpoint.every_n_steps
    watch(registry, CheckpointStatistics, lambda: checkpoint_statistics(checkpoints, every_n_steps=every))
    serve_process(registry, config, arguments.run_folder, process="learner", port=arguments.metrics_port)


def _lead(learner: Learner, arguments: Arguments) -> None:
    """Note the config, publish the first weights, train, and write the summary in any case.

    A learner that cannot be built notes nothing: the files still describe the steps so far.
    Stop the workers only at the end of the run: after a failure the learner may restart, and they go on meanwhile.
    """
    collect_rarely()
    learner.reporter.start_clock()
    config, version, team = learner.config, learner.policy_version, learner.train_step.team
    begin_stretch(arguments.run_folder, config, version)
    forget_earlier_summary(arguments.run_folder)
    measured = {record.name for record in learner.reporter.evaluations if record.policy_version == version}
    evaluate = not measured.issuperset(source.label for source in config.data.eval_sources)
    # Publish version 0, too: a server that this run did not start may have any weights.
    learner.intake.commit(version, team.gather_weights, evaluate=evaluate)
    reason = "failed"
    try:
        reason = learner.run()
        learner.intake.stop_workers(config.launcher.drain_timeout_s / 4)
    finally:
        learner.close()
        try:
            learner.reporter.write_summary(
                arguments.run_folder / SUMMARY_NAME,
                learner.intake.statistics(),
                policy_version=learner.policy_version,
                warm_start_s=arguments.warm_start_s,
                exit_reason=reason,
            )
        except OSError as error:  # a full disk must not hide the error that ended the run
            logger.error("summary.json could not be written: %s", error)
        learner.intake.close()
        learner.reporter.close()
    logger.info("the learner is done: %s at version %d", reason, learner.policy_version)
    team.stop()


def _channel(config: Config, arguments: Arguments) -> Callable[[], LearnerChannel]:
    address = read_address(arguments.wire, keys=arguments.run_folder / "keys", end="learner")
    return lambda: LearnerChannel.bind(address, limits=Limits(max_message_bytes=config.wire.max_message_bytes))


def _reporter(
    config: Config, folder: Path, version: int, registry: CollectorRegistry, totals: Totals, checkpoints: Checkpoints
) -> Reporter:
    """Remove the records after the checkpoint's version from metrics.jsonl, and open the file."""
    path, health = folder / "metrics.jsonl", Health(config, breaks_of(folder, resumed=(version, config)))
    cut_records(path, version)
    watch(registry, HealthStatistics, health.statistics)
    reporter = Reporter(
        file=MetricsFile(path),
        registry=registry,
        health=health,
        records=records_so_far(path),
        totals=totals,
        checkpoints=checkpoints,
        config=config,
        policy_version=max(0, version),
    )
    watch(registry, PaceStatistics, reporter.pace)
    return reporter


def _recorder(config: Config, folder: Path, tokenizer: PreTrainedTokenizerBase, policy_version: int) -> Recorder:
    """Remove the records after the checkpoint from trajectories.jsonl, and open the file."""
    cut_records(folder / FILE_NAME, policy_version - 1)  # records carry the version before their step
    return Recorder(folder / FILE_NAME, tokenizer, config.telemetry)


def _batches(config: Config, arguments: Arguments, policy_version: int) -> BatchRecorder | None:
    """Remove the batches after the checkpoint, and begin to record if the config asks for that."""
    folder, path = batches_of(arguments.run_folder), Path(arguments.model_path)
    cut_batches(folder, policy_version)
    if not config.wire.record:
        return None
    start = Start(
        policy_version=policy_version,
        config=dump_config(config),
        model_path=str(path.resolve()) if path.is_dir() else arguments.model_path,
        device=arguments.device,
        num_threads=arguments.num_threads,
        software=software(arguments.device),
    )
    return BatchRecorder(folder, start)


def _drain_on_signals(intake: IntakeService, timeout_s: float) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        if intake.draining:
            return  # Slurm and the launcher both send the signal; the launcher ends a slow process
        logger.info("signal %d: draining", number)
        intake.begin_drain()
        deadline = threading.Timer(timeout_s, os._exit, [128 + number])  # if the launcher itself is gone
        deadline.daemon = True
        deadline.start()

    _on_signals(handle)


def _on_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in _DRAIN_SIGNALS:
        signal.signal(number, handler)


def _parse() -> Arguments:
    parser = argparse.ArgumentParser(prog="python -m areal_rloo.learner")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meeting", default="", help="host:port where the learner's ranks meet")
    parser.add_argument("--wire", required=True, help="the address to listen on (wire/address.py)")
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("--same-host", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--warm-start-s", type=float, default=0.0)
    return parser.parse_args(namespace=Arguments())


if __name__ == "__main__":
    exit_despite_calls(main())
