"""What a config names: models, data, the user's functions, the Python that has SGLang."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from areal_rloo.config import Config, SGLangConfig, import_function
from areal_rloo.errors import ConfigError, ModelError, UserError
from areal_rloo.launcher.findings.base import Finding, Situation, ok, refused, unsure, wrong
from areal_rloo.models.folder import (
    cached_folder,
    check_model_folder,
    check_tokenizer,
    check_weights,
    hub_cache,
    num_parameters,
)
from areal_rloo.tasks import check_data
from areal_rloo.tasks.tools.sandbox import check_sandbox

_SGLANG_IMPORT_S = 180.0
_CONFIG_FIX = "correct the config"


def check_sglang(situation: Situation) -> Iterator[Finding]:
    """A Python that has it, or the key of servers that run already."""
    config = situation.config
    if config is None or config.rollout.engine != "sglang":
        return
    from areal_rloo.engines.sglang import find_api_key, find_python  # noqa: PLC0415 - its neighbours import torch

    sglang = config.rollout.sglang
    key = "rollout.sglang.api_key_env" if sglang.urls else "rollout.sglang.python"
    try:
        if sglang.urls:
            find_api_key(sglang)
        else:
            yield ok(key, find_python(sglang))
    except ConfigError as error:
        yield refused(key, error, fix=_CONFIG_FIX)


def check_sglang_imports(situation: Situation) -> Iterator[Finding]:
    """SGLang can be imported there, and is the version that ours is tested with."""
    config = situation.config
    if config is None or config.rollout.engine != "sglang" or config.rollout.sglang.urls:
        return
    from areal_rloo.engines.sglang.capabilities import TESTED_VERSION  # noqa: PLC0415 - its neighbours import torch

    key, fix = "rollout.sglang.python", "run make sglang"
    seen = _import_sglang(config.rollout.sglang)
    if isinstance(seen, ConfigError):
        return  # `check_sglang` says so
    if not seen.startswith("sglang "):
        yield wrong(key, f"sglang cannot be imported: {seen}", fix)
        return
    version = seen.split()[1]
    if version == TESTED_VERSION:
        yield ok(key, seen)
    else:
        yield unsure(key, f"{seen}; tested is {TESTED_VERSION}", f"pip install 'sglang=={TESTED_VERSION}' there")


def _import_sglang(sglang: SGLangConfig) -> str | ConfigError:
    """`sglang VERSION, torch VERSION`, or the last words of what failed."""
    from areal_rloo.engines.sglang import find_python  # noqa: PLC0415 - its neighbours import torch

    ask = "import sglang, torch; print(f'sglang {sglang.__version__} with torch {torch.__version__}')"
    try:
        command = [find_python(sglang), "-c", ask]
    except ConfigError as error:
        return error
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SGLANG_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {_SGLANG_IMPORT_S:g} s"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def check_models(situation: Situation) -> Iterator[Finding]:
    """The model folders of the policy and of the reference: readable, whole, with a tokenizer."""
    if situation.config is None:
        return
    for key, path in model_paths(situation.config):
        if path == "tiny":
            yield ok(key, "tiny, which is made on first use")
            continue
        if not situation.runs_here and Path(path).is_absolute() and not Path(path).exists():
            yield unsure(key, f"{path}: not on this host", "make sure that it is on those that will run")
            continue
        try:
            expected = "a model folder, a hub name (org/name), or tiny"
            folder = check_model_folder(key, path, else_expected=expected, files="a Hugging Face model folder")
            if folder is not None:
                check_weights(key, folder)
                if key == "model.path":
                    check_tokenizer(key, folder)
                yield ok(key, f"{path}: {num_parameters(folder):,} parameters")
        except ModelError as error:
            yield refused(key, error, fix=f"set {key} to a Hugging Face model folder")


def check_hub_models(situation: Situation) -> Iterator[Finding]:
    """Where a model is a name of the hub: downloaded and whole, or to be downloaded by somebody who may."""
    if situation.config is None:
        return
    for key, path in model_paths(situation.config):
        if path == "tiny" or Path(path).exists():
            continue
        cached = cached_folder(path, situation.environment)
        download = f"run `hf download {path}` where the hub can be reached"
        if cached is not None:
            try:
                check_weights(key, cached)
                yield ok(key, f"{path}: downloaded, {num_parameters(cached):,} parameters")
                continue
            except ModelError as error:
                lacks = str(error).removeprefix(f"{key}: ")
        else:
            lacks = f"{path}: not in {hub_cache(situation.environment)}"
        if variable := offline_variable(situation):
            yield wrong(key, f"{lacks}, and {variable} is set", f"unset {variable}, or {download}", ModelError)
        else:
            yield unsure(key, f"{lacks}; every host would download it at its start", download)


def offline_variable(situation: Situation) -> str | None:
    """The variable that forbids asking the hub, if one does."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if situation.environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return name
    return None


def check_functions(situation: Situation) -> Iterator[Finding]:
    """What the user wrote can be imported."""
    if situation.config is None:
        return
    for key, path in _function_paths(situation.config):
        try:
            import_function(key, path)
            yield ok(key, path)
        except ConfigError as error:
            yield refused(key, error, fix="correct it, seen from the folder that you start from")


def check_data_files(situation: Situation) -> Iterator[Finding]:
    """Tasks, files, rewards."""
    if situation.config is None:
        return
    try:
        check_data(situation.config.data)
        yield ok("data", "files, tasks and rewards are in order")
    except UserError as error:
        key, colon, _ = str(error).partition(": ")
        name = key if colon and key.startswith("data") else "data"
        yield refused(name, error, fix="correct the config, or put the file there")


def check_tool_sandbox(situation: Situation) -> Iterator[Finding]:
    """What the policy may run can be locked in here, and away from the run folder."""
    if situation.config is None:
        return
    episode = situation.config.rollout.episode
    if episode.type != "tool_use" or "python" not in episode.tools:
        return
    try:
        check_sandbox([situation.folder] if situation.folder is not None else [])
        yield ok("sandbox", "programs can be locked in")
    except UserError as error:
        yield refused("sandbox", error, fix="run on Linux 5.13 or later, or take python out of rollout.episode.tools")


def model_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Keys and paths of the models that a run loads, but for those of rewards."""
    yield "model.path", config.model.path
    reference = config.model.reference
    if reference is not None and reference.path != "initial":
        yield "model.reference.path", reference.path


def policy_parameters(situation: Situation) -> int | None:
    """How many numbers the policy has; None where that is not known yet, or too few to matter."""
    if situation.config is None or situation.config.model.path == "tiny":
        return None
    path = situation.config.model.path
    folder = Path(path) if Path(path).is_dir() else cached_folder(path, situation.environment)
    try:
        return None if folder is None else num_parameters(folder)
    except ModelError:
        return None  # `check_models` says so


def _function_paths(config: Config) -> Iterator[tuple[str, str]]:
    if config.algorithm.group_filter is not None:
        yield "algorithm.group_filter", config.algorithm.group_filter
    episode = config.rollout.episode
    if episode.agent is not None:
        yield "rollout.episode.agent", episode.agent
    elif not episode.built_in:
        yield "rollout.episode.type", episode.type
