"""Checks of the inputs of a config: models, data, the user's functions, the Python of a server, the sandbox."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from areal_rloo.config import Config, import_function
from areal_rloo.engines.installed import find_api_key, find_python, package_of, remedy
from areal_rloo.errors import ConfigError, EngineError, ModelError, UserError
from areal_rloo.intake.curriculum import load_curriculum
from areal_rloo.launcher.doctor.base import Finding, Situation, last_line, ok, refused, unsure, wrong
from areal_rloo.launcher.doctor.hub import missing_datasets, model_paths
from areal_rloo.launcher.placement import gpus_each
from areal_rloo.models.folder import (
    INDEX,
    SINGLE,
    cached_folder,
    check_layers,
    check_model_folder,
    check_policy_weights,
    check_targets,
    check_tokenizer,
    linear_layers,
    num_parameters,
    read_config,
)
from areal_rloo.models.hub import missing_files
from areal_rloo.models.served import check_served
from areal_rloo.models.sizes import SHIPPED, Sizes
from areal_rloo.models.trainable import check_shapes, check_trainable, tested
from areal_rloo.rewards import check_rewards, reward_parts
from areal_rloo.rewards.functions import is_async
from areal_rloo.rollout.trial import try_own_episode
from areal_rloo.tasks import check_data
from areal_rloo.tasks.code.task import CodeTask
from areal_rloo.tasks.tools import make_tools
from areal_rloo.tasks.tools.sandbox import check_sandbox

_IMPORT_S = 180.0


def check_server(situation: Situation) -> Iterator[Finding]:
    """Check for a Python with the server of the engine, or for the key of running servers."""
    rollout = situation.config.rollout
    if rollout.engine == "embedded" or (server := rollout.server) is None:
        return
    package = package_of(rollout.engine)
    key = f"{package.key}.api_key_env" if server.urls else f"{package.key}.python"
    try:
        if server.urls:
            find_api_key(package, server)
        else:
            yield ok(key, find_python(package, server, on_gpus=_engine_has_gpus(situation)))
    except ConfigError as error:
        yield refused(key, error, fix="correct the config")
    except EngineError as error:
        yield unsure(key, str(error).removeprefix(f"{key}: "), "try again")


def check_server_imports(situation: Situation) -> Iterator[Finding]:
    """Import the server in a process, and compare with the tested version."""
    rollout = situation.config.rollout
    if rollout.engine == "embedded" or (server := rollout.server) is None or server.urls:
        return
    package, on_gpus = package_of(rollout.engine), _engine_has_gpus(situation)
    key, name = f"{package.key}.python", package.distribution
    try:
        python = find_python(package, server, on_gpus=on_gpus)
    except (ConfigError, EngineError):
        return  # `check_server` reports the error
    ask = f"import {name}, torch; print(f'{name} {{{name}.__version__}} with torch {{torch.__version__}}')"
    _, seen = last_line([python, "-c", ask], timeout_s=_IMPORT_S)
    if not seen.startswith(f"{name} "):
        yield wrong(key, f"{name} cannot be imported: {seen}", remedy(package, on_gpus=on_gpus))
    elif seen.split()[1] == package.tested_version:
        yield ok(key, seen)
    else:
        fix = f"pip install '{name}=={package.tested_version}' there"
        yield unsure(key, f"{seen}; tested is {package.tested_version}", fix)


def _engine_has_gpus(situation: Situation) -> bool:
    return gpus_each(situation.config, [situation.host])[1] > 0


def check_models(situation: Situation) -> Iterator[Finding]:
    """Check for complete, readable models of the policy and the reference, with a tokenizer."""
    for key, path in model_paths(situation):
        if path == "tiny":
            yield from _check_tiny(key, situation.config)
            continue
        if not situation.runs_here and Path(path).is_absolute() and not Path(path).exists():
            yield unsure(key, f"{path}: not on this host", "make sure that all hosts of the run have it")
            continue
        try:
            expected = "a model folder, a hub name (org/name), or tiny"
            folder = check_model_folder(key, path, else_expected=expected, files="a Hugging Face model folder")
            if folder is None:
                _check_downloaded(key, path, situation)
            else:
                _check_family(key, folder, situation.config)
                _check_weights(key, folder)
                if key == "model.path":
                    check_tokenizer(key, folder)
                else:
                    _check_vocabulary(folder, situation.config)
                yield ok(key, f"{path}: {num_parameters(folder):,} parameters")
        except ModelError as error:
            yield refused(key, error, fix=f"set {key} to a Hugging Face model folder")


def _check_downloaded(key: str, name: str, situation: Situation) -> None:
    """Raise ModelError if the cache of the hub has a model that a run would refuse; it may lack files of weights."""
    folder = cached_folder(name, situation.environment)
    if folder is None:
        return
    whole = not missing_files(folder)
    _check_family(key, folder, situation.config, with_weights=whole)
    if whole:
        _check_weights(key, folder)


def _check_vocabulary(folder: Path, config: Config) -> None:
    """Raise ModelError if the reference at a folder has another vocabulary than a policy on this host."""
    policy = Path(config.model.path)
    if not policy.is_dir():
        return
    own, other = (read_config("model.reference.path", path).get("vocab_size") for path in (policy, folder))
    if isinstance(own, int) and isinstance(other, int) and own != other:
        raise ModelError(
            f"model.reference.path: {folder} has a vocabulary of {other}, expected the policy's {own}; both must share "
            "a tokenizer"
        )


def _check_weights(key: str, folder: Path) -> None:
    """Raise ModelError if the weights of a folder are not whole, or do not fit config.json."""
    stored = check_policy_weights(key, folder)
    check_shapes(key, folder, stored)
    check_layers(key, folder, stored)


def _check_tiny(key: str, config: Config) -> Iterator[Finding]:
    try:
        if config.learner.lora is not None:
            check_targets(config.learner.lora, Sizes.of_tiny(config.model.tiny).matrices)
        yield ok(key, "tiny, made on first use")
    except ModelError as error:
        yield refused(key, error, fix="leave learner.lora.targets out")


def _check_family(key: str, folder: Path, config: Config, *, with_weights: bool = True) -> None:
    """Raise ModelError if the learner cannot train the model, or the engine does not serve the policy."""
    check_trainable(key, folder, context_tokens=config.context_tokens)
    if key == "model.path" and config.learner.lora is not None and with_weights:
        check_targets(config.learner.lora, linear_layers(folder))
    if key == "model.path":
        check_served(key, folder, config.rollout.engine)


def check_loading(situation: Situation) -> Iterator[Finding]:
    """Load names, shapes, tokenizer and a small copy of each model with transformers, as the processes of a run do."""
    yield from _loaded(situation, unlisted_alone=False)


def check_unlisted(situation: Situation) -> Iterator[Finding]:
    """Do the same for families that no test compares; for the others, a dry run spares these seconds."""
    yield from _loaded(situation, unlisted_alone=True)


def _loaded(situation: Situation, *, unlisted_alone: bool) -> Iterator[Finding]:
    for key, path in model_paths(situation):
        folder = Path(path) if Path(path).is_dir() else cached_folder(path, situation.environment)
        if path == "tiny" or folder is None:
            continue
        try:
            check_trainable(key, folder, context_tokens=situation.config.context_tokens)
            if unlisted_alone and tested(read_config(key, folder)):
                continue
            if has_weights := any((folder / name).is_file() for name in (INDEX, SINGLE)):
                check_policy_weights(key, folder)
        except ModelError:
            continue  # `check_models` and `check_hub` report the error
        try:
            more = ["weights"] * has_weights + ["tokens"] * (key == "model.path")
            _check_copy(key, folder, situation.config.context_tokens, more)
            yield ok(
                key, f"{path}: the files are those of the model, whose small copy has the logprobs of transformers"
            )
        except ModelError as error:
            yield refused(key, error, fix="download the model again")


def _check_copy(key: str, folder: Path, context_tokens: int, more: Sequence[str]) -> None:
    """Make the checks of `models/equality.py` in a process, which imports torch; raise ModelError likewise."""
    command = [sys.executable, "-m", "areal_rloo.models.equality", str(folder), str(context_tokens), *more]
    same, words = last_line(command, timeout_s=_IMPORT_S)
    if not same:
        raise ModelError(f"{key}: {words.removeprefix('model.path: ')}")


def check_functions(situation: Situation) -> Iterator[Finding]:
    """Import the user's functions."""
    episode = situation.config.rollout.episode
    paths = {
        "algorithm.group_filter": situation.config.algorithm.group_filter,
        "rollout.episode.agent": episode.agent,
        "rollout.episode.type": None if episode.built_in or episode.agent is not None else episode.type,
    }
    for key, path in paths.items():
        if path is None:
            continue
        try:
            if key == "rollout.episode.type":
                _check_episode(situation.config)
            else:
                function = import_function(key, path)
                if key == "algorithm.group_filter":
                    _check_filter(key, path, function)
            yield ok(key, path)
        except ConfigError as error:
            yield refused(key, error, fix="correct the path, relative to the working folder")
    yield from _check_tools(situation.config)


def _check_tools(config: Config) -> Iterator[Finding]:
    sources = (*config.data.keyed_train_sources, *config.data.keyed_eval_sources)
    own = {f"{key}.episode": source.episode for key, source in sources if source.episode is not None}
    for key, episode in {"rollout.episode": config.rollout.episode, **own}.items():
        try:
            if tools := make_tools(episode, key):
                yield ok(f"{key}.tools", ", ".join(tools))
        except ConfigError as error:
            yield refused(f"{key}.tools", error, fix="correct the tool, or leave it out")


def check_own_parts(situation: Situation) -> Iterator[Finding]:
    """Try the user's parts of the algorithm in a process, which imports torch (`algorithm/own_parts.py`)."""
    algorithm = situation.config.algorithm
    paths = {
        "algorithm.loss.kind": None if algorithm.loss.built_in else algorithm.loss.kind,
        "algorithm.advantages": algorithm.advantages,
        "algorithm.sample_weights": algorithm.sample_weights,
    }
    given = {key: path for key, path in paths.items() if path is not None}
    if not given:
        return
    command = [sys.executable, "-m", "areal_rloo.algorithm.own_parts", msgspec.json.encode(algorithm).decode()]
    works, words = last_line(command, timeout_s=_IMPORT_S)
    if works:
        yield from (ok(key, path) for key, path in given.items())
    else:
        key = next((key for key in given if words.startswith(f"{key}: ")), next(iter(given)))
        text = words if words.startswith(f"{key}: ") else f"{key}: {given[key]} cannot be tried: {words}"
        yield refused(key, ConfigError(text), fix="correct the function")


def _check_episode(config: Config) -> None:
    """Try the user's episode, as each worker makes it; a count that is still `auto` is 1."""
    learner, rollout = config.learner, config.rollout
    learner = msgspec.structs.replace(learner, num_ranks=learner.num_ranks or learner.num_replicas)
    rollout = msgspec.structs.replace(rollout, num_workers=rollout.num_workers or 1)
    try_own_episode(msgspec.structs.replace(config, learner=learner, rollout=rollout))


def _check_filter(key: str, path: str, function: Callable[..., object]) -> None:
    """Check the call of the filter with a group. An async function would keep every group."""
    expected = f"{key}: expected a function of one group, such as `def keep(group):`"
    if is_async(function):
        raise ConfigError(f"{expected}, but {path} is async; leave out async")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"{expected}, but {path} cannot be called with it: {error}") from error
    except ValueError:
        return  # of a builtin, the parameters may be unknown


def check_data_files(situation: Situation) -> Iterator[Finding]:
    """Check the data section: tasks, files, rewards; and the arguments of an agent, which are fields of the data."""
    try:
        looked = check_data(situation.config.data, most_item_bytes=situation.config.wire.most_item_bytes)
        check_rewards(situation.config.data, looked)
        load_curriculum(situation.config, [items for (split, _), items in looked.items() if split == "train"])
        if (agent := situation.config.rollout.episode.agent) is not None:
            from areal_rloo.rollout.agent import check_agent  # noqa: PLC0415 - imports aiohttp

            for (_, label), items in looked.items():
                if situation.config.episode_of(label).agent is not None:
                    check_agent(agent, items)
        absent = dict.fromkeys(key for key, _ in missing_datasets(situation))  # `check_hub` looks for these
        what = "tasks and rewards are in order" if absent else "files, tasks and rewards are in order"
        yield ok("data", f"{what}; not here yet: {', '.join(absent)}" if absent else what)
    except UserError as error:
        key, colon, _ = str(error).partition(": ")
        name = key if colon and key.startswith(("data", "rollout")) else "data"
        yield refused(name, error, fix="correct the config, or put the file there")


def check_tool_sandbox(situation: Situation) -> Iterator[Finding]:
    """Try the sandbox on this host, if the policy's Python or the task `code` needs it; and the time of such a task."""
    config, within_s = situation.config, situation.config.rollout.reward_timeout_s
    used = (config.rollout.episode, *config.episodes.values())
    needed = any(episode.type == "tool_use" and "python" in episode.tools for episode in used)
    keys = ["rollout.episode.tools"] if needed else []
    try:
        parts = [part for part in reward_parts(situation.config.data) if part.config.task]
        tasks = [(part.key if part.source.rewards else part.key_of_source, part.make_task(0)) for part in parts]
    except UserError:
        tasks = []  # `check_data_files` reports the error
    for key, task in tasks:
        if isinstance(task, CodeTask):
            keys.append(key)
            if task.longest_s >= within_s:
                what = f"{within_s:g} s, but the programs of a completion at {key} may take {task.longest_s:g} s"
                yield wrong("rollout.reward_timeout_s", what, "raise it, or lower parameters.total_s and wall_s there")
    if not keys:
        return
    try:
        check_sandbox([situation.folder] if situation.folder is not None else [])
        yield ok("sandbox", "the sandbox works")
    except UserError as error:
        yield refused("sandbox", error, fix=f"run on Linux 5.13 or later, or change {keys[0]}")


def policy_parameters(situation: Situation) -> int | None:
    """Count the parameters of the policy; None if the number is unknown, or too small to matter.

    The models of the shipped configs need no download.
    """
    path = situation.config.model.path
    if path == "tiny":
        return None
    folder = Path(path) if Path(path).is_dir() else cached_folder(path, situation.environment)
    try:
        return _shipped_parameters(path) if folder is None else num_parameters(folder)
    except ModelError:
        return None  # `check_models` reports the error


def _shipped_parameters(path: str) -> int | None:
    return SHIPPED[path].num_parameters if path in SHIPPED else None
