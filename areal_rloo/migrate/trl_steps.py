"""Batches and steps of TRL and ms-swift: samples of all processes, and optimizer steps, in our prompts and batches."""

from __future__ import annotations

from typing import Any

from areal_rloo.errors import DataError, shown
from areal_rloo.migrate.reading import Found
from areal_rloo.migrate.rules import Given, Options, UnreadableError, number, whole

PROCESSES, HOSTS = "num_processes", "num_machines"  # as accelerate calls them; the processes are those of all hosts
_OF_A_HOST = ("NPROC_PER_NODE", "nproc_per_node")
_HOSTS = (HOSTS, "NNODES", "nnodes")


def processes(found: Found) -> Options:
    """Return the numbers of processes and of hosts that a script or its launcher names.

    Raises:
        DataError: a number is none, as in `--nproc_per_node gpu`, or the hosts have no equal shares.
    """
    given = found.variables | found.settings

    def count(*names: str) -> int | None:
        name = next((name for name in names if name in given), None)
        if name is None:
            return None
        number = given[name]
        if name in found.doubtful:
            raise DataError(f"{name}: depends on a branch; set the number of all processes with --processes N")
        if isinstance(number, bool) or not str(number).isdecimal() or int(number) < 1:
            raise DataError(
                f"{name}: expected a number, got {shown(str(number))}; set the number of all processes with "
                "--processes N"
            )
        return int(number)

    if (num := count(PROCESSES)) is None and (of_a_host := count(*_OF_A_HOST)) is not None:
        num = of_a_host * (count(*_HOSTS) or 1)
    if num is None:
        return {}
    hosts = count(*_HOSTS) or 1
    if num % hosts:
        raise DataError(f"{PROCESSES}: expected equal shares on {hosts} hosts, got {num}; set it with --processes N")
    return {PROCESSES: num, **({HOSTS: hosts} if hosts > 1 else {})}


def gpus(value: Any, given: Given) -> Options:
    """Give each process a GPU."""
    of_a_host = whole(value) // whole(given.get(HOSTS, 1))
    return {"launcher.gpus_per_host": of_a_host, "learner.num_ranks": "auto", "rollout.num_workers": "auto"}


def batch(value: Any, given: Given) -> Options:
    """Compute the batch of all processes: TRL generates `steps_per_generation` of their batches together."""
    accumulated, all_processes = _count("gradient_accumulation_steps", given, 1), _count(PROCESSES, given, 1)
    together = whole(value) * all_processes
    if given.get("generation_batch_size"):
        steps = max(1, _count("generation_batch_size", given, 1) // together)
    else:
        steps = _count("steps_per_generation", given, accumulated)
    num_samples, group = together * steps, _count("num_generations", given, group_size(given))
    if num_samples % group or steps % accumulated or steps // accumulated > num_samples // group:
        raise UnreadableError(f"expected groups of {group} in {num_samples} samples; set learner.groups_per_step")
    return {
        "algorithm.group_size": group,
        "learner.groups_per_step": num_samples // group,
        "learner.num_minibatches": steps // accumulated,
    }


def part_of_batch(value: Any, given: Given) -> Options:
    """Give nothing: a part of an unknown batch is for the user, too."""
    batch(given.get("per_device_train_batch_size", 8), given)
    return {}


def _count(name: str, given: Given, default: int) -> int:
    try:
        return whole(given.get(name) or default)
    except UnreadableError as error:
        raise UnreadableError(f"{name}: {error}") from error


def group_size(given: Given) -> int:
    return 2 if given.get("trainer") == "RLOOTrainer" else 8


def updates_per_batch(given: Given) -> int:
    made = batch(given.get("per_device_train_batch_size", 8), given)
    return int(made["learner.num_minibatches"]) * whole(given.get("num_iterations", 1))


def in_batches(key: str, value: Any, given: Given) -> Options:
    """Convert optimizer steps, which TRL counts, to train steps."""
    return {key: -(-whole(value) // updates_per_batch(given))}


def max_steps(value: Any, given: Given) -> Options:
    if number(value) <= 0:
        return {}
    return in_batches("learner.num_train_steps", value, given) | {"data.num_epochs": None}


def epochs(value: Any, given: Given) -> Options:
    if number(given.get("max_steps", -1)) > 0:
        return {}
    num = number(value)
    if num != int(num):
        raise UnreadableError("expected whole epochs; set learner.num_train_steps")
    return {"data.num_epochs": int(num), "learner.num_train_steps": "auto"}


def warmup(value: Any, given: Given) -> Options:
    """Steps, or below 1 a share of all; steps come before a share."""
    if 0 < number(value) < 1:
        has_steps = number(given.get("warmup_steps", 0)) >= 1
        return {} if has_steps else {"learner.optimizer.warmup_share": value}
    return {"learner.optimizer.warmup_steps": int(value)} if value else {}
