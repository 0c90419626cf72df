"""Checks of the models and datasets that a run takes from the hub: a single finding for each."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from areal_rloo.errors import DataError, ModelError, UserError, install
from areal_rloo.launcher.doctor.addresses import Question, Trouble, no_answer
from areal_rloo.launcher.doctor.base import Finding, Situation, ok, refused, unsure, wrong
from areal_rloo.models.folder import cached_folder, hub_cache, is_hub_name, num_parameters
from areal_rloo.models.hub import missing_files
from areal_rloo.rewards import reward_parts
from areal_rloo.tasks import hub_datasets

_HUB_S = 3.0  # a start without a network ends within 5 s
_HUB = "https://huggingface.co"
_REFUSALS = (401, 403, 404)  # HTTP: no such name, or none for this user


class _Need(NamedTuple):
    """What this host knows about a model or a dataset, and the question for the hub if it must be downloaded."""

    finding: Finding
    question: str = ""
    otherwise: str = ""  # than a download at the start
    lacks: str = ""  # the facts alone


def check_downloads(situation: Situation) -> Iterator[Finding]:
    """Check for each model and dataset whether it is downloaded, or may be. Nothing is asked."""
    for need in (*_models(situation), *_datasets(situation)):
        yield need.finding


def check_hub(situation: Situation) -> Iterator[Finding]:
    """Do the same, and ask the hub for access to everything not downloaded yet: a run without it would fail."""
    base, token = situation.environment.get("HF_ENDPOINT", _HUB).rstrip("/"), situation.environment.get("HF_TOKEN")
    silent: Trouble | None = None  # then nothing more is asked
    for finding, question, otherwise, lacks in (*_models(situation), *_datasets(situation)):
        if not question:
            yield finding
            continue
        trouble = silent or no_answer(Question(f"{base}/{question}", token), within_s=_HUB_S)
        if trouble is None:
            yield dataclasses.replace(finding, what=f"{finding.what}; {base} has it")
            continue
        silent = trouble if trouble.status is None else None
        if finding.state == "wrong":  # nothing could read it
            what, fix = f"{finding.what}; besides, {base}: {trouble.words}", finding.fix
        else:
            what, fix = f"{lacks}, and {base}: {trouble.words}", f"{_mend(finding.name, trouble)}, or {otherwise}"
        yield wrong(finding.name, what, fix, DataError if finding.name.startswith("data") else ModelError)


def _mend(key: str, trouble: Trouble) -> str:
    if trouble.status is None:
        return f"check {key}, mend the network"
    return f"correct {key}, log in with `hf auth login`" if trouble.status in _REFUSALS else "try again later"


def _models(situation: Situation) -> Iterator[_Need]:
    keys: dict[str, str] = {}  # evaluation sets often have the reward models of their train sources
    for key, path in (*model_paths(situation), *_reward_models(situation)):
        keys.setdefault(path, key)
    for path, key in keys.items():
        if path == "tiny" or Path(path).exists() or not is_hub_name(path):  # `check_models` may refuse
            continue
        cached = cached_folder(path, situation.environment)
        download = f"run `hf download {path}` where the hub can be reached"
        missing = f"not in {hub_cache(situation.environment)}" if cached is None else missing_files(cached)
        if cached is not None and not missing:
            yield _Need(_complete(key, path, cached))
        elif variable := offline_variable(situation):
            what, fix = f"{path}: {missing}, and {variable} is set", f"unset {variable}, or {download}"
            yield _Need(wrong(key, what, fix, ModelError, absent=True))
        else:
            what = f"{path}: {missing}; every host will download the model at the start"
            otherwise = f"download it elsewhere and set {key} to its folder"
            question = f"{path}/resolve/main/config.json"
            yield _Need(unsure(key, what, download), question, otherwise, f"{path}: {missing}")


def _complete(key: str, path: str, folder: Path) -> Finding:
    try:
        return ok(key, f"{path}: downloaded, {num_parameters(folder):,} parameters")
    except ModelError as error:
        return refused(key, error, fix="download the model again")


def _datasets(situation: Situation) -> Iterator[_Need]:
    for key, name in missing_datasets(situation):
        source, _, field = key.rpartition(".")
        otherwise = f"set {source}.path to a local file" + (f" and {key} to null" if field == "hub" else "")
        question = f"api/datasets/{name.partition(':')[0]}"
        if variable := offline_variable(situation):
            what, fix = f"{name} is not downloaded, and {variable} is set", f"unset {variable}, or {otherwise}"
            yield _Need(wrong(key, what, fix, DataError, absent=True))
        elif importlib.util.find_spec("datasets") is None:
            found = f"{name} is on the hub" if field == "hub" else f"null means the hub ({name})"
            what = f"{found}, which needs the `datasets` library"
            fix = f"{otherwise}, or run {install('data')}"
            yield _Need(wrong(key, what, fix, DataError, absent=True), question)
        else:
            yield _Need(ok(key, f"{name}: downloaded at the start"), question, otherwise, f"{name}: not downloaded yet")


def offline_variable(situation: Situation) -> str | None:
    """Give the name of a variable that forbids downloads from the hub, or None."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if situation.environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return name
    return None


def model_paths(situation: Situation) -> Iterator[tuple[str, str]]:
    """Give key and path of each model of a run, except models of rewards."""
    model = situation.config.model
    yield "model.path", model.path
    if model.reference is not None and model.reference.path != "initial":
        yield "model.reference.path", model.reference.path


def _reward_models(situation: Situation) -> Iterator[tuple[str, str]]:
    try:
        for part in reward_parts(situation.config.data):
            if part.config.model is not None:
                yield f"{part.key}.model", part.config.model
    except DataError:
        return  # `check_data_files` reports the error


def missing_datasets(situation: Situation) -> Iterator[tuple[str, str]]:
    """Give key and name of each dataset of the hub that is not in the cache of earlier downloads."""
    environment = situation.environment
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = Path(environment.get("HF_DATASETS_CACHE") or f"{home}/datasets").expanduser()
    data = situation.config.data
    try:
        named = list(hub_datasets(data))
    except UserError:
        return  # `check_data_files` reports the error
    for key, name in named:
        if not (cache / name.partition(":")[0].replace("/", "___")).is_dir():
            yield key, name
