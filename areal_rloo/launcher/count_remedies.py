"""Advice for a plan with more processes than the hosts have GPUs, or with fewer. All of it was tried, as in `remedies`.

Pure functions; `fit` gives the plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from areal_rloo.config import Config
from areal_rloo.errors import UserError
from areal_rloo.launcher.placement import Host, Placement
from areal_rloo.launcher.remedies import Remedy, TooLargeError, assign, memory_remedies
from areal_rloo.models.sizes import Sizes

_MOST_TOGETHER = 3  # options for the memory, beside those for the counts
_MOST_HOSTS = 64

Plan = Callable[[Config, Sequence[Host]], Placement]
"""Plan a config on hosts, or raise a UserError."""

Changes = tuple[Remedy, ...]


def count_advice(config: Config, model: Sizes | None, hosts: Sequence[Host], plan: Plan) -> str:
    """Name each accepted change of counts and devices, and the number of GPUs or hosts that the config needs as it is.

    If the counts alone are not enough, because the model is too large, add the fewest options for the memory.
    """
    found, large = [], []
    for changes in _changes(config):
        try:
            plan(_changed(config, changes), hosts)
            found.append(_words(changes))
        except TooLargeError:
            large.append(changes)
        except UserError:
            continue
    advice = [f"set {', or '.join(dict.fromkeys(found))}"] if found else []
    if not found and model is not None:
        advice = list(itertools.islice(_with_memory(config, large, model, hosts, plan), 1))
    advice += more_gpus(config, hosts, plan, most=_MOST_HOSTS)
    return ", or ".join(advice) or "take a smaller model, or more GPUs"


def _changes(config: Config) -> Iterator[Changes]:
    """Give changes, those with the least effect first."""
    learner, rollout = config.learner, config.rollout
    counts = [*_count_changes(config)]
    yield from counts
    both = counts[-1] if counts else ()
    num = rollout.tensor_parallel // 2
    while num >= 1 and not rollout.server_urls:
        for given in dict.fromkeys(((), both)):
            yield (*given, assign("rollout.tensor_parallel", str(num), num))
        num //= 2
    others: list[Remedy] = [assign("rollout.tensor_parallel", "1", 1)] if rollout.tensor_parallel > 1 else []
    if rollout.share_devices == "never":
        yield (assign("rollout.share_devices", "auto", "auto"),)
        others.append(assign("rollout.share_devices", "auto", "auto"))
    if learner.num_replicas > 1:
        yield (*both, assign("learner.num_replicas", "1", 1))
        others.append(assign("learner.num_replicas", "1", 1))
    if (both or len(others) > 1) and others and not rollout.server_urls:
        yield (*both, *others)
    if config.model.path == "tiny" and rollout.engine == "embedded":  # others are too slow there
        yield (assign("rollout.device", "cpu", "cpu"),)
        yield (assign("learner.device", "cpu", "cpu"), assign("rollout.device", "cpu", "cpu"))


def _count_changes(config: Config) -> Iterator[Changes]:
    """Give `auto` for a count, then for both."""
    rollout = config.rollout
    ranks = (assign("learner.num_ranks", "auto", 0),) if config.learner.num_ranks else ()
    workers = (assign("rollout.num_workers", "auto", 0),) if rollout.num_workers and not rollout.server_urls else ()
    counts: list[Changes] = [workers, ranks, (*ranks, *workers)]
    yield from dict.fromkeys(filter(None, counts))


def _with_memory(
    config: Config, large: Sequence[Changes], model: Sizes, hosts: Sequence[Host], plan: Plan
) -> Iterator[str]:
    """Give changes of counts with options for the memory, the shortest lists first."""
    num_gpus = sum(len(host.gpu_ids) for host in hosts)
    for size in range(1, _MOST_TOGETHER + 1):
        for changes in large:
            remedies = [*memory_remedies(_changed(config, changes), model, num_gpus)]
            for chosen in itertools.combinations(remedies, size):
                together = (*changes, *chosen)
                if len({remedy.key for remedy in together}) == len(together) and all("=" in r.words for r in chosen):
                    with contextlib.suppress(UserError):
                        plan(_changed(config, together), hosts)
                        yield f"combine {_words(together)}"


def more_gpus(config: Config, hosts: Sequence[Host], plan: Plan, *, most: int) -> Iterator[str]:
    """Name the least number of GPUs on a host, or of hosts like the first, with an accepted plan, up to `most`."""
    first, several = hosts[0], len(hosts) > 1
    for num in range(len(hosts) + 1 if several else len(first.gpu_ids) + 1, most + 1):
        ids = first.gpu_ids if several else tuple(map(str, range(num)))
        like = [dataclasses.replace(first, name=f"host-{index}", gpu_ids=ids) for index in range(num if several else 1)]
        with contextlib.suppress(UserError):
            plan(config, like)
            yield f"set launcher.num_hosts={num}" if several else f"start where {num} GPUs are"
            return


def _changed(config: Config, changes: Changes) -> Config:
    for remedy in changes:
        config = remedy.change(config)
    return config


def _words(changes: Changes) -> str:
    return " ".join(remedy.words for remedy in changes)


def unused_gpus(config: Config, placement: Placement, plan: Plan) -> str:
    """Say how many GPUs of the hosts a plan leaves unused, and the counts that use most; empty if it uses all, or none.

    `config` is as the user wrote it, `placement` that of the plan.
    """
    there, used = sum(len(host.gpu_ids) for host in placement.hosts), _num_used(placement)
    if used in (0, there):
        return ""
    most, best = used, ""
    ranks = [(assign("learner.num_ranks", str(num), num),) for num in range(1, min(there, _MOST_HOSTS))]
    for changes in [*_count_changes(config), *ranks]:
        with contextlib.suppress(UserError):
            num = _num_used(plan(_changed(config, changes), placement.hosts))
            if num > most:
                most, best = num, _words(changes)
    are = "GPU is" if there == 1 else "GPUs are"
    return f"{used} of {there} {are} used" + (f"; set {best} to use {most}" if best else "")


def _num_used(placement: Placement) -> int:
    return len({(seat.host.name, gpu) for seat in placement.seats for gpu in seat.gpu_ids})
