"""Advice for a plan with more memory than the GPUs have.

An option is named only if a plan of the changed config is accepted: by the checks of the config, the counts of GPUs and
the memory. If no option is enough alone, the shortest sufficient list of options is named. Pure functions.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_rloo.config import Config, LoraConfig
from areal_rloo.errors import PreflightError, UserError
from areal_rloo.launcher.engine_memory import given_options, without_options
from areal_rloo.learner.memory import GIB, broadcast_bytes
from areal_rloo.models.sizes import Sizes

_MOST_TOGETHER = 4  # options of a list; longer lists change more than a user asked for
_LORA_RANK = 16
_FEWEST_SLOTS = 16  # of advice
RANK, ENGINE = "a rank", "an engine"
_LEAST_SHOWN_BYTES = 0.05 * GIB  # of a saving


Needs = Mapping[str, float]
"""The least bytes of a rank and of an engine."""


class TooLargeError(PreflightError):
    """A rank of the learner or an engine, as `what` says, needs more memory than a GPU has."""

    def __init__(self, words: str, what: str, needed_bytes: Needs) -> None:
        super().__init__(words)
        self.what = what
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of a config, in words for the command line. Remedies with the same key exclude each other."""

    key: str
    words: str
    change: Callable[[Config], Config]


def advice(
    refusal: TooLargeError,
    config: Config,
    model: Sizes,
    num_gpus: int,
    needs: Callable[[Config], Needs],
    gain: Callable[[Config], str] | None = None,
) -> str:
    """Name each sufficient option, with the gain, or else a list of options sufficient together, or else nothing.

    `needs` plans a config and gives the bytes, or raises a UserError. `gain` describes a sufficient plan; None: by the
    saving.
    """

    def saved(needed: Needs) -> str:
        saving = refusal.needed_bytes[refusal.what] - needed[refusal.what]
        return f"{saving / GIB:.1f} GiB less" if saving >= _LEAST_SHOWN_BYTES else ""

    enough: dict[str, tuple[Remedy, str]] = {}  # by key, with the gain
    usable: dict[str, tuple[Remedy, str]] = {}  # the strongest of each key, refused for memory alone
    for remedy in memory_remedies(config, model, num_gpus):
        if remedy.key in enough:
            continue
        try:
            changed = remedy.change(config)
            needed = needs(changed)
            enough[remedy.key] = remedy, saved(needed) if gain is None else gain(changed)
        except TooLargeError as error:
            usable[remedy.key] = remedy, saved(error.needed_bytes)
        except UserError:
            continue
    if enough:
        return _in_words(list(enough.values()), "set", " or ")
    for size in range(2, _MOST_TOGETHER + 1):
        for chosen in itertools.combinations(usable.values(), size):
            if _fits_together(config, [remedy for remedy, _ in chosen], needs):
                return _in_words(list(chosen), "combine", " ")
    return ""


def _fits_together(config: Config, remedies: Sequence[Remedy], needs: Callable[[Config], Needs]) -> bool:
    for remedy in remedies:
        config = remedy.change(config)
    with contextlib.suppress(UserError):
        needs(config)
        return True
    return False


def _in_words(remedies: Sequence[tuple[Remedy, str]], verb: str, between: str) -> str:
    """Write assignments as on the command line, each with the gain, and then the options to leave out."""
    sets = [remedy.words for remedy, _ in remedies if "=" in remedy.words]
    out = [f"leave out {remedy.words}" for remedy, _ in remedies if "=" not in remedy.words]
    less = {remedy.words: gain for remedy, gain in remedies if gain}
    if verb == "set":
        parts = [f"{words} ({less[words]})" if words in less else words for words in sets]
        return ", or ".join([f"set {between.join(parts)}", *out] if parts else out)
    alone = ", ".join(f"{words.partition('=')[0]} {gain}" for words, gain in less.items())
    return ", and ".join([f"combine {between.join(sets)}", *out]) + (f" (alone {alone})" if alone else "")


def memory_remedies(config: Config, model: Sizes, num_gpus: int) -> Iterator[Remedy]:
    """Give the possible changes, those with the least effect first; of a key, the weakest first."""
    yield from _in_time(config, model, num_gpus)
    yield from _in_counts(config, model, num_gpus)
    yield from _in_numbers(config)
    for key in given_options(config):
        if key == "rollout.embedded.cache_tokens":
            yield assign(key, "null", None)
        else:
            yield Remedy("the engine's memory", " and ".join(given_options(config)), without_options)
            return


def _in_time(config: Config, model: Sizes, num_gpus: int) -> Iterator[Remedy]:
    """Give changes at the cost of time alone."""
    learner, reference = config.learner, config.model.reference
    if learner.gradient_checkpointing is False:
        yield assign("learner.gradient_checkpointing", "true", True)
    longest, row = config.trajectory_tokens, learner.microbatch_tokens
    for shorter in dict.fromkeys((max(longest, row // 2), longest)):
        if shorter < row:
            yield assign("learner.microbatch_tokens", str(shorter), shorter)
    if reference is not None and not reference.offload and config.algorithm.kl.coefficient > 0:
        yield assign("model.reference.offload", "true", True)
    asked = config.rollout.share_devices
    if asked == "side_by_side" or (asked == "auto" and num_gpus == 1):
        yield assign("rollout.share_devices", "in_turns", "in_turns")
    if broadcast_bytes(model, config).whole and config.launcher.num_hosts == 1 and not config.rollout.server_urls:
        yield assign("weights.transport", "shared_memory", "shared_memory")
    slots = config.rollout.num_slots // 2
    while slots >= _FEWEST_SLOTS:  # each has the logits of a token
        yield assign("rollout.num_slots", str(slots), slots)
        slots //= 2
    if learner.offload == "none":
        yield assign("learner.offload", "optimizer", "optimizer")
    if learner.offload != "parameters":
        yield assign("learner.offload", "parameters", "parameters")


def _in_counts(config: Config, model: Sizes, num_gpus: int) -> Iterator[Remedy]:
    """Give changes of the number of GPUs for a copy of the policy or of the model; `auto` counts grow alone."""
    learner, rollout = config.learner, config.rollout
    if learner.num_ranks:
        for num in range(learner.num_ranks + learner.num_replicas, num_gpus, learner.num_replicas):
            yield assign("learner.num_ranks", str(num), num)
    if learner.num_replicas > 1:
        yield assign("learner.num_replicas", "1", 1)
    if rollout.num_workers > 1 and not rollout.server_urls:
        yield assign("rollout.num_workers", "auto", 0)
    num = 2 * rollout.tensor_parallel
    while rollout.server is not None and num < num_gpus and model.num_heads % num == 0:
        yield assign("rollout.tensor_parallel", str(num), num)
        num *= 2


def _in_numbers(config: Config) -> Iterator[Remedy]:
    """Give changes with an effect on the numbers of the training."""
    if config.learner.optimizer.state_dtype == "float32":
        yield assign("learner.optimizer.state_dtype", "bfloat16", "bfloat16")
    if config.model.dtype == "float32":
        yield assign("model.dtype", "bfloat16", "bfloat16")
    if config.learner.lora is None:
        yield Remedy("learner.lora", f"learner.lora.rank={_LORA_RANK}", _with_lora)


def assign(key: str, written: str, value: Any) -> Remedy:
    """Make a change of a key, with the value as written on the command line."""
    return Remedy(key, f"{key}={written}", lambda config: _replaced(config, key.split("."), value))


def _replaced(section: Any, path: list[str], value: Any) -> Any:
    """Replace a value deep in a section."""
    name, *rest = path
    inner = _replaced(getattr(section, name), rest, value) if rest else value
    return msgspec.structs.replace(section, **{name: inner})


def _with_lora(config: Config) -> Config:
    lora = LoraConfig(rank=_LORA_RANK)
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, lora=lora))
