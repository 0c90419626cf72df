"""Checks of limits of the host and the container (files, processes, locked memory, cores, memory), and of the plan."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from areal_rloo.config import Config
from areal_rloo.container_limits import cgroup_value, cpu_quota, memory
from areal_rloo.errors import UserError
from areal_rloo.launcher.doctor.base import Finding, Situation, ok, refused, size, unsure, wrong, wrong_or_unsure
from areal_rloo.launcher.doctor.inputs import policy_parameters
from areal_rloo.launcher.fit import few_words, memory_words, model_sizes, planned, resolved
from areal_rloo.launcher.gpu_need import gpu_need
from areal_rloo.launcher.host_memory import host_parts
from areal_rloo.launcher.hosts import num_cores
from areal_rloo.launcher.placement import Placement, place

_MANY_FILES, _BASIC_FILES = 4096, 256
_MANY_PROCESSES, _BASIC_PROCESSES = 4096, 256
_MANY_TORCH, _TORCH_PER_CORE, _TORCH_BYTES = 64, 16, 150 * 2**20  # processes with torch; the least memory of each
_MANY_REWARDS, _REWARDS_PER_CORE = 256, 64
_MANY_THREADS, _THREADS_PER_CORE = 128, 16  # of a process
_MUCH_SWAP_BYTES = 2**30
_INFINIBAND = Path("/sys/class/infiniband")


def check_limits(situation: Situation) -> Iterator[Finding]:
    """Check the soft limits of `ulimit`."""
    files = _BASIC_FILES + _num_connections(situation.config)
    yield _counted("open files", "-n", resource.RLIMIT_NOFILE, needed=files, many=_MANY_FILES)
    yield _counted("processes", "-u", resource.RLIMIT_NPROC, needed=_BASIC_PROCESSES, many=_MANY_PROCESSES)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield ok("locked memory", "unlimited")
    elif _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        what = f"ulimit -l is {size(locked)}, and InfiniBand locks buffers in memory"
        yield unsure("locked memory", what, "ulimit -l unlimited (containers: --ulimit memlock=-1)")
    else:
        yield ok("locked memory", f"{size(locked)}; enough without InfiniBand")
    for name, option, kind in (("address space", "-v", resource.RLIMIT_AS), ("file size", "-f", resource.RLIMIT_FSIZE)):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            what = f"ulimit {option} is {size(soft)}; CUDA and checkpoints need more"
            yield unsure(name, what, f"ulimit {option} unlimited")


def _counted(name: str, option: str, kind: int, *, needed: int, many: int) -> Finding:
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft >= many:
        return ok(name, "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    root = hard != resource.RLIM_INFINITY and hard < many
    fix = f"ulimit {option} {many}" + (f"; the hard limit is {hard}: raise it in limits.conf" if root else "")
    too_few = soft < needed
    need = f", a run needs some {needed}" if too_few else "; many workers need more"
    return wrong_or_unsure(name, f"ulimit {option} is {soft}{need}", fix, is_wrong=too_few)


def _num_connections(config: Config) -> int:
    """Estimate the connections of a process: a worker with server and services, or the learner with all workers."""
    rollout = config.rollout
    slots = rollout.num_slots if rollout.server is not None else 0
    return max(slots + rollout.num_async_rewards + 4 * rollout.num_reward_workers, 4 * rollout.num_workers)


def check_cores(situation: Situation) -> Iterator[Finding]:
    """Compare the usable cores (affinity, container quota) with the threads of the config."""
    cores = num_cores()
    quota = cpu_quota()
    if quota is None or quota >= cores:
        yield ok("cores", str(cores))
    else:
        what = f"{cores} cores are visible, the container may use {quota:g}: threads would wait for each other"
        fix = "start it with a set of cores (--cpuset-cpus), or set learner.num_threads and rollout.num_threads"
        yield unsure("cores", what, fix)
    learner, rollout = situation.config.learner, situation.config.rollout
    each = (learner.num_ranks * learner.num_threads, rollout.num_workers * rollout.num_threads)
    threads = max(each) if rollout.takes_turns else sum(each)
    if threads > cores:
        what = f"learner.num_threads={learner.num_threads} and rollout.num_threads={rollout.num_threads} ask for "
        what += f"{threads} threads in all, one host has {cores} cores"
        yield unsure("threads", what, "set both to 0 for an even share")


def check_memory(situation: Situation) -> Iterator[Finding]:
    """Compare the memory, within the container's limit, with the parts of a run in the memory of the host."""
    most = situation.config.launcher.memory_per_host
    total, available = (min(each, most or each) for each in memory())
    what = f"{size(available)} of {size(total)} free"
    if situation.describes_gpus:
        total = available = situation.host.memory_bytes
        what = f"{size(total)} described" if total else "unknown for hosts as described (launcher.memory_per_host)"
    swap = psutil.swap_memory().used
    if swap > _MUCH_SWAP_BYTES:
        yield unsure("swap", f"{size(swap)} in use: a process that touches it is very slow", "end other processes")
    parameters = policy_parameters(situation)
    if parameters is None:
        yield ok("memory", what)
        return
    try:
        parts = host_memory(situation, parameters)
    except UserError:  # other checks report the error
        yield ok("memory", what)
        return
    needed = sum(parts.values())
    what += f"; {_in_words(parts)}"
    if needed <= available or not total:
        yield ok("memory", what)
    else:
        fix = "take a larger host or a smaller model, raise learner.num_ranks over more hosts, or see docs/learner.md"
        if gpu_need(situation.config, situation.hosts, model_sizes(situation.config, situation.environment)):
            fix = f"start where GPUs are, or {fix}"
        yield wrong_or_unsure("memory", what, fix, is_wrong=needed > total)


def check_plan(situation: Situation) -> Iterator[Finding]:
    """Plan the run as a start does: counts, and the estimate of learner and engine with the memory of the GPUs."""
    hosts, model = situation.hosts, model_sizes(situation.config, situation.environment)
    what, semicolon, fix = gpu_need(situation.config, hosts, model).partition("; ")
    if semicolon:
        yield wrong("plan", what, fix)
        return
    try:
        config = resolved(situation.config, hosts, model)
        place(config, hosts)
    except UserError as error:
        yield refused("plan", error, fix="change the config, or take other hosts")
        return
    what, semicolon, fix = few_words(situation.config, hosts, model).partition("; ")
    if semicolon:
        yield unsure("plan", what, fix)
    else:
        yield ok("plan", memory_words(config, hosts, model))


def host_memory(situation: Situation, parameters: int) -> dict[str, float]:
    """Estimate the bytes of a run on a host, by part; raises UserError if the run cannot be planned."""
    hosts, model = situation.hosts, model_sizes(situation.config, situation.environment)
    config = planned(situation.config, hosts, model)
    return host_parts(config, place(config, hosts), model, parameters)


def _in_words(parts: Mapping[str, float]) -> str:
    parted = ", ".join(f"{part} {size(num_bytes)}" for part, num_bytes in parts.items())
    return f"a run takes about {size(sum(parts.values()))}: {parted}"


def lacking_memory(situation: Situation, placement: Placement) -> str:
    """Say that the hosts of a plan have too little memory, or unknown memory; empty if they have enough.

    The situation has the plan's config.
    """
    parameters, known = policy_parameters(situation), [host.memory_bytes for host in placement.used_hosts]
    if parameters is None:
        return ""
    model = model_sizes(situation.config, situation.environment)
    parts = host_parts(situation.config, placement, model, parameters)
    if not all(known):
        words = "unknown (launcher.memory_per_host describes it)"
        return f"host memory: {words}; {_in_words(parts)}; a start would be refused with less"
    if sum(parts.values()) <= min(known):
        return ""
    return (
        f"host memory: {size(min(known))}, and {_in_words(parts)}; a start there would be refused "
        "(launcher.memory_per_host describes other hosts)"
    )


def check_processes(situation: Situation) -> Iterator[Finding]:
    """Compare the processes of a run on this host alone, and the threads of each, with its cores and its memory."""
    config = situation.config
    num_ranks, num_workers = config.learner.num_ranks, config.rollout.num_workers
    most = max(_MANY_TORCH, num_cores() * _TORCH_PER_CORE, len(situation.config.rollout.server_urls))
    total, _ = memory()
    for key, count in (("learner.num_ranks", num_ranks), ("rollout.num_workers", num_workers)):
        if count > most:
            yield wrong(key, f"expected at most {most} processes on {num_cores()} cores, got {count}", f"lower {key}")
        elif count * _TORCH_BYTES > total:
            what = f"{count} processes take at least {size(count * _TORCH_BYTES)}, this host has {size(total)}"
            yield wrong(key, what, f"lower {key}")
    num_rewards, most = num_workers * config.rollout.num_reward_workers, num_cores() * _REWARDS_PER_CORE
    if num_rewards > max(_MANY_REWARDS, most):
        what = f"expected at most {max(_MANY_REWARDS, most)} processes on {num_cores()} cores, got {num_rewards}"
        yield wrong("rollout.num_reward_workers", f"{what} for all workers", "lower rollout.num_reward_workers")
    most = max(_MANY_THREADS, num_cores() * _THREADS_PER_CORE)
    threads = {"learner.num_threads": config.learner.num_threads, "rollout.num_threads": config.rollout.num_threads}
    for key, count in threads.items():
        if count > most:
            what = f"expected at most {most} threads of a process on {num_cores()} cores, got {count}"
            yield wrong(key, what, f"lower {key}, or set 0 for an even share")


def check_process_limit(situation: Situation) -> Iterator[Finding]:
    """Check the container's limit of processes and threads, if there is a limit."""
    most, now = cgroup_value("pids.max"), cgroup_value("pids.current") or 0
    if most is not None and (left := most - now) < _MANY_PROCESSES:
        what = f"{left} more processes and threads may be started, of {most}"
        fix = "raise the container's limit of processes (docker run --pids-limit)"
        yield wrong_or_unsure("container", what, fix, is_wrong=left < _BASIC_PROCESSES)
