"""The configs of a run, one for each stretch of steps between two changes; torch is not imported.

    configs/step-000000.yaml       the config of the first steps
            step-000040.yaml       the config from version 40 on
            starts.jsonl           the version and the time of each start of the learner
    config.yaml                    the present config
    checkpoints/step-000040/config.yaml    the config that wrote this checkpoint

The learner writes the files in `configs`, because only the learner knows from which checkpoint a resume starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from areal_rloo.config import Config, EpisodeConfig, EvalSourceConfig, dump_config, load_config
from areal_rloo.config.resume import Change, changes
from areal_rloo.decoding import from_json
from areal_rloo.errors import CheckpointError, ConfigError, DecodeError
from areal_rloo.files import read_regular, write_atomically
from areal_rloo.telemetry.health import Breaks

_NAME = re.compile(r"step-([0-9]{6,})\.yaml")
# A change of these keys moves the mean reward, whatever the policy does.
_REWARDED = (
    *("data.train", "rollout.sampling", "rollout.episode", "rollout.reward_timeout_s", "algorithm.rewards"),
    *("algorithm.min_reward_std", "algorithm.group_filter"),
)
_STARTS = "starts.jsonl"
CONFIG_NAME, STATE_NAME = "config.yaml", "state.msgpack"  # in a checkpoint


class Stretch(NamedTuple):
    """A part of a run with a single config."""

    version: int  # at the beginning
    config: str  # as YAML
    changes: list[Change]  # against the stretch before


class Start(msgspec.Struct, frozen=True):
    """A start of the learner: the first, a resume, or one after a crash."""

    version: int  # of the checkpoint; 0 for the beginning
    time: str  # in UTC


def has_intact_config(checkpoint: Path) -> bool:
    """Return True if the config of a checkpoint has its checksum; the learner compares all other files, too."""
    try:
        sums = from_json(read_regular(checkpoint / "checksums.json"), dict[str, str])
        return sums.get(CONFIG_NAME) == hashlib.sha256(read_regular(checkpoint / CONFIG_NAME)).hexdigest()
    except (OSError, DecodeError):
        return False


def changes_since(checkpoint: Path, config: Config) -> list[Change]:
    """Compare a config with the config that wrote a checkpoint.

    Raises:
        CheckpointError: a key must not change on a resume, or the config of the checkpoint cannot be read.
    """
    try:
        before = load_config(str(checkpoint / CONFIG_NAME))
    except ConfigError as error:
        raise CheckpointError(
            f"{error}; resume with the version of areal_rloo that wrote the checkpoint, or start again with another "
            "run.folder"
        ) from error
    found = changes(before, config)
    refused = [change for change in found if change.rule.effect == "refused"]
    for change in refused:
        more = f" (and {len(refused) - 1} more keys that must not change)" if len(refused) > 1 else ""
        raise CheckpointError(
            f"{change.key}: expected {change.both[0]} as in {checkpoint.name}, got {change.both[1]}: "
            f"{change.rule.words}{more}; set it back, or train on from this model in another run.folder, with "
            f"model.path={checkpoint / 'model'}"
        )
    return found


def begin_stretch(run_folder: Path, config: Config, version: int) -> None:
    """Note a start, and the config from this version on; forget the configs of later steps, which come again."""
    folder, files, text = run_folder / "configs", _files(run_folder), dump_config(config)
    for later in [at for at in files if at >= version]:
        files.pop(later).unlink()
    if not files or read_regular(files[max(files)]) != text.encode():
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"step-{version:06d}.yaml", text.encode())
    with contextlib.suppress(OSError), (folder / _STARTS).open("ab") as file:  # for the report alone
        file.write(msgspec.json.encode(Start(version, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}")) + b"\n")


def read_starts(run_folder: Path) -> list[Start]:
    """Read the starts of a run; without unreadable lines."""
    starts: list[Start] = []
    with contextlib.suppress(OSError):
        for line in read_regular(run_folder / "configs" / _STARTS).splitlines():
            with contextlib.suppress(DecodeError):
                starts.append(from_json(line, Start))
    return starts


def read_stretches(run_folder: Path) -> list[Stretch]:
    """Read the stretches of a run, the oldest first; a config that cannot be compared has no changes."""
    stretches: list[Stretch] = []
    before: Config | None = None
    for version, path in _files(run_folder).items():
        config = _loaded(path)
        found = changes(before, config) if before is not None and config is not None else []
        stretches.append(Stretch(version, read_regular(path).decode(errors="replace"), found))
        before = config
    return stretches


def breaks_of(run_folder: Path, *, resumed: tuple[int, Config] | None = None) -> Breaks:
    """Give the versions at which rewards or evaluations have changed.

    `resumed`: the version and the config of a resume whose learner has not begun.
    """
    configs = {version: _loaded(path) for version, path in _files(run_folder).items()}
    if resumed is not None:
        configs = {version: config for version, config in configs.items() if version < resumed[0]}
        configs[resumed[0]] = resumed[1]
    measured: dict[str, tuple[EvalSourceConfig, int, EpisodeConfig]] = {}
    evaluations: dict[str, list[int]] = {}
    known = [(version, config) for version, config in configs.items() if config is not None]
    for version, config in known:
        for source in config.data.eval_sources:
            now = (source, config.eval_max_new_tokens, config.rollout.episode)
            before = measured.get(source.label)
            if before not in (None, now):
                evaluations.setdefault(source.label, []).append(version)
            measured[source.label] = now
    rewards = [
        version
        for (_, before_it), (version, config) in itertools.pairwise(known)
        if any(change.key.startswith(_REWARDED) for change in changes(before_it, config))
    ]
    return Breaks(rewards, evaluations)


def _loaded(path: Path) -> Config | None:
    try:
        return load_config(str(path))
    except ConfigError:  # of another version of areal_rloo
        return None


def _files(run_folder: Path) -> dict[int, Path]:
    names = {path: _NAME.fullmatch(path.name) for path in (run_folder / "configs").glob("step-*.yaml")}
    return dict(sorted((int(name[1]), path) for path, name in names.items() if name is not None))
