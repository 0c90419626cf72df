"""Batches and steps of TRL and ms-swift: samples of all processes, and optimizer steps, in our prompts and batches."""

from __future__ import annotations

from typing import Any

from areal_rloo.errors import DataError, shown
from areal_rloo.migrate.reading import Found
from areal_rloo.migrate.rules import Given, Options, UnreadableError, number, whole

PROCESSES = "NPROC_PER_NODE"  # the number of processes, as the command line or the script says


def processes(found: Found) -> Options:
    """Return the number of processes that a script or its launcher names.

    Raises:
        DataError: the number is none, as in `--nproc_per_node gpu`.
    """
    names = ("num_processes", "nproc_per_node")
    name, given = next(((name, found.settings[name]) for name in names if name in found.settings), (PROCESSES, None))
    count = found.variables.get(PROCESSES, given)
    if count is None:
        return {}
    if isinstance(count, bool) or not str(count).isdecimal() or int(count) < 1:
        name = PROCESSES if PROCESSES in found.variables else name
        raise DataError(f"{name}: expected a number of processes, got {shown(str(count))}; set it with --processes N")
    return {PROCESSES: int(count)}


def batch(value: Any, given: Given) -> Options:
    """Compute the batch of all processes: TRL generates `steps_per_generation` of their batches together."""
    accumulated, all_processes = whole(given.get("gradient_accumulation_steps", 1)), whole(given.get(PROCESSES, 1))
    together = whole(value) * all_processes
    if given.get("generation_batch_size"):
        steps = max(1, whole(given["generation_batch_size"]) // together)
    else:
        steps = whole(given.get("steps_per_generation") or accumulated)
    num_samples, group = together * steps, whole(given.get("num_generations", group_size(given)))
    if num_samples % group or steps % accumulated or steps // accumulated > num_samples // group:
        raise UnreadableError(f"expected groups of {group} in {num_samples} samples; set learner.groups_per_step")
    return {
        "algorithm.group_size": group,
        "learner.groups_per_step": num_samples // group,
        "learner.num_minibatches": steps // accumulated,
    }


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
    if 0 < number(value) < 1:
        raise UnreadableError("a share of all steps; set learner.optimizer.warmup_steps")
    return {"learner.optimizer.warmup_steps": int(value)} if value else {}
