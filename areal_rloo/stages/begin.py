"""Start or resume a training in this process: a command line in, a `Training` out.

    parse ─► the config ─► a locked folder ─► data, model, checkpoint ─► Training

A mistake of the user ends the program before anything is in the folder. `--resume` reads the newest whole checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from areal_rloo.config import Config, RolloutConfig, SamplingConfig, check_overrides, import_entry, load_config
from areal_rloo.errors import CheckpointError, ConfigError, PreflightError
from areal_rloo.launcher.epochs import with_steps
from areal_rloo.launcher.fit import model_sizes, resolved
from areal_rloo.launcher.hosts import ClaimedGpus, real_host
from areal_rloo.launcher.run_folder import choose_folder, resume_changes, write_beginning
from areal_rloo.launcher.start import hold, leaves_nothing
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.learner.checkpoint_folder import folder_of
from areal_rloo.learner.resuming import check_model, newest_checkpoint
from areal_rloo.learner.team import Team
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.learner.warm_start import prepare_tiny_model
from areal_rloo.models.files import load_tokenizer, policy_folder, stop_token_ids
from areal_rloo.models.folder import read_config
from areal_rloo.program import Parser
from areal_rloo.stages.training import Data, Show, Training
from areal_rloo.telemetry.logs import setup_logs
from areal_rloo.telemetry.record_file import RecordFile, cut_records
from areal_rloo.wire.messages import History


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model whose weights are not loaded yet."""

    path: str
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The parts in which the programs differ. `learner_config` and `load` get the config of the command line."""

    name: str
    learner_config: Callable[[Config], Config]
    load: Callable[[Config, Model], Data]
    show: Show


def parse(parser: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Add the arguments of a training to a parser, and read a command line; import the entry of the config.

    Raises:
        ConfigError: an argument or an option is wrong, or needs more than one process.
    """
    parser.add_argument("--config", required=True, help="a path, or the name of a shipped config")
    parser.add_argument("--resume", action="store_true", help="go on in run.folder from the newest checkpoint")
    options, rest = parser.parse_known_args(arguments)
    config = load_config(options.config, check_overrides(rest))
    import_entry(config.run.entry)
    learner = config.learner
    for key, value, expected, fits in (
        ("learner.num_ranks", learner.num_ranks, "1 or auto", learner.num_ranks <= 1),
        ("learner.offload", learner.offload, "none or optimizer", learner.offload != "parameters"),
    ):
        if not fits:
            raise ConfigError(
                f"{key}: expected {expected}, because this program is a single process, got {value}; for a large model "
                "set learner.lora, learner.offload=optimizer or learner.optimizer.state_dtype=bfloat16"
            )
    return options, config


def begin(program: Program, config: Config, *, resume: bool) -> Training:
    """Lock the folder, load everything, and note the start. The caller closes the records.

    Raises:
        UserError: the folder, the data, the model or the checkpoint cannot be used; nothing is left in a new folder.
    """
    setup_logs(program.name, level=config.telemetry.log_level, file=None)
    folder = _folder(program.name, config, resume=resume)
    with leaves_nothing(folder):
        hold(folder, config, resume=resume)
        is_tiny = config.model.path == "tiny"
        path = prepare_tiny_model(config).path if is_tiny else str(policy_folder(config.model.path, config))
        model = Model(path, load_tokenizer(path), int(read_config("model.path", Path(path))["vocab_size"]))
        data = program.load(config, model)
        config = with_steps(config, num_prompts=len(data.groups))
        training = _loaded(program, config, folder, model, data, resume=resume)
    try:
        write_beginning(folder, config, [], program.name)
        setup_logs(program.name, level=config.telemetry.log_level, file=folder / "logs" / f"{program.name}.log")
        records = folder / f"{program.name}.jsonl"
        cut_records(records, training.policy_version or -1)  # version 0 is measured again
        training.records = RecordFile(records)
    except OSError as error:
        raise PreflightError(f"run.folder: {folder} cannot be written: {error.strerror}; free some disk") from error
    return training


def _folder(name: str, config: Config, *, resume: bool) -> Path:
    """Choose the folder of a start, or check the folder of a resume.

    Raises:
        UserError: the folder is in use, or has nothing to resume.
    """
    if not resume:
        return choose_folder(config, resume=False)
    folder = None if config.run.folder is None else Path(config.run.folder).resolve()
    if folder is None or not (folder / f"{name}.jsonl").exists():
        expected = f"--resume: expected the folder of an earlier `areal-rloo {name}` in run.folder"
        raise CheckpointError(f"{expected}, got {'null' if folder is None else folder}")
    return folder


def _loaded(program: Program, config: Config, folder: Path, model: Model, data: Data, *, resume: bool) -> Training:
    """Build the learner on a device of this host, from the newest checkpoint if there is any."""
    checkpoints, stream = Checkpoints(folder_of(folder)), data.stream(config)
    for line in resume_changes(folder, config) if resume else ():
        print(line)  # noqa: T201 - users read this line
    restored = newest_checkpoint(checkpoints, config, resume=resume)
    if restored is not None:
        stream.restore(restored[1].stream)
    learner_config, device = _placed(program.learner_config(config))
    torch.manual_seed(config.run.seed)
    rank = build_rank(learner_config, model_path=model.path, device=device, resumes=restored is not None)
    stops = stop_token_ids(model.path, model.tokenizer)
    train_step = TrainStep(Team(rank), learner_config, stop_token_ids=stops)
    version = 0
    history: History = ()
    if restored is not None:
        path, state = restored
        version, history = state.policy_version, state.history
        check_model(state, learner_config, Path(model.path), rank.base)
        rank.load(path / "shards", num_optimizer_steps=state.num_optimizer_steps)
        rank.base = state.base
        train_step.resume(state.kl_coefficient)
    return Training(
        config=config,
        learner_config=learner_config,
        folder=folder,
        data=data,
        stream=stream,
        train_step=train_step,
        device=device,
        tokenizer=model.tokenizer,
        checkpoints=checkpoints,
        show=program.show,
        policy_version=version,
        history=(*history, (uuid.uuid4().hex, version)),
    )


def _placed(config: Config) -> tuple[Config, torch.device]:
    """Claim a free GPU, or take the CPU; replace `auto` in the config, and set the number of threads.

    Raises:
        UserError: no GPU is free, or the model does not fit.
    """
    host = real_host(config.launcher)
    if config.learner.device == "cpu" or (config.learner.device == "auto" and not host.gpu_ids):
        host = dataclasses.replace(host, gpu_ids=())
    else:
        gpus = ClaimedGpus()
        free = gpus.claim(host).gpu_ids[:1]
        if not free:
            raise PreflightError("learner.device: no GPU is free; wait for other runs, or set it to cpu")
        gpus.keep(free)
        os.environ["CUDA_VISIBLE_DEVICES"] = free[0]  # before torch looks
        host = dataclasses.replace(host, gpu_ids=free)
    sampling = config.rollout.sampling
    rollout = RolloutConfig(
        num_workers=1,
        device="cpu",  # no engine runs here
        sampling=SamplingConfig(temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens),
        episode=config.rollout.episode,
    )
    learner = msgspec.structs.replace(config.learner, num_ranks=1, device="cuda" if host.gpu_ids else "cpu")
    config = resolved(
        msgspec.structs.replace(config, rollout=rollout, learner=learner), [host], model_sizes(config, os.environ)
    )
    torch.set_num_threads(config.learner.num_threads or host.num_cores)
    return config, torch.device(config.learner.device)
