"""What this host lets a process have: files, processes, locked memory, cores, memory; a container's limits too."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from areal_rloo.config import Config
from areal_rloo.launcher.findings.base import Finding, Situation, ok, size, unsure, wrong
from areal_rloo.launcher.findings.inputs import policy_parameters
from areal_rloo.launcher.hosts import num_cores

_MANY_FILES, _BASIC_FILES = 4096, 256
_MANY_PROCESSES, _BASIC_PROCESSES = 4096, 256
_CGROUP = Path("/sys/fs/cgroup")
_MUCH_SWAP_BYTES = 2**30
_INFINIBAND = Path("/sys/class/infiniband")


def check_limits(situation: Situation) -> Iterator[Finding]:
    """`ulimit`: the soft limits, which this shell passes on."""
    files = _BASIC_FILES if situation.config is None else _BASIC_FILES + _num_connections(situation.config)
    yield _counted("open files", "-n", resource.RLIMIT_NOFILE, needed=files, many=_MANY_FILES)
    yield _counted("processes", "-u", resource.RLIMIT_NPROC, needed=_BASIC_PROCESSES, many=_MANY_PROCESSES)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield ok("locked memory", "unlimited")
    elif _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        what = f"ulimit -l is {size(locked)}, and InfiniBand registers its buffers"
        yield unsure("locked memory", what, "ulimit -l unlimited (containers: --ulimit memlock=-1)")
    else:
        yield ok("locked memory", f"{size(locked)}; no InfiniBand asks for more")
    for name, option, kind in (("address space", "-v", resource.RLIMIT_AS), ("file size", "-f", resource.RLIMIT_FSIZE)):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            what = f"ulimit {option} is {size(soft)}; CUDA and checkpoints want much of it"
            yield unsure(name, what, f"ulimit {option} unlimited")


def _counted(name: str, option: str, kind: int, *, needed: int, many: int) -> Finding:
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft >= many:
        return ok(name, "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    root = hard != resource.RLIM_INFINITY and hard < many
    fix = f"ulimit {option} {many}" + (f"; the hard limit is {hard}: raise it in limits.conf" if root else "")
    if soft < needed:
        return wrong(name, f"ulimit {option} is {soft}, a run needs some {needed}", fix)
    return unsure(name, f"ulimit {option} is {soft}; many workers need more", fix)


def _num_connections(config: Config) -> int:
    """Of one process, about: a worker's with its server and services, or the learner's with its workers."""
    rollout = config.rollout
    slots = rollout.num_slots if rollout.engine == "sglang" else 0
    return max(slots + rollout.num_async_rewards + 4 * rollout.num_reward_workers, 4 * rollout.num_workers)


def check_cores(situation: Situation) -> Iterator[Finding]:
    """Cores that may be used, by affinity and by the container's quota, and the threads that the config asks for."""
    cores = num_cores()
    quota = cpu_quota()
    if quota is not None and quota < cores:
        what = f"{cores} cores are seen, the container may use {quota:g}: threads would hold each other up"
        fix = "start it with a set of cores (--cpuset-cpus), or set learner.num_threads and rollout.num_threads"
        yield unsure("cores", what, fix)
    else:
        yield ok("cores", str(cores))
    if situation.config is None:
        return
    learner, rollout = situation.config.learner, situation.config.rollout
    threads = learner.num_ranks * learner.num_threads + rollout.num_workers * rollout.num_threads
    if threads > cores:
        what = f"learner.num_threads={learner.num_threads} and rollout.num_threads={rollout.num_threads} ask for "
        what += f"{threads} threads in all, one host has {cores} cores"
        yield unsure("threads", what, "set both to 0 for an even share")


def check_memory(situation: Situation) -> Iterator[Finding]:
    """Memory, the container's limit, and swap, against what the weights alone take."""
    total, available = memory()
    swap = meminfo("SwapTotal") - meminfo("SwapFree")
    if swap > _MUCH_SWAP_BYTES:
        yield unsure("swap", f"{size(swap)} in use: whatever touches it stands still", "end what uses the memory")
    what = f"{size(available)} of {size(total)} free"
    parameters = policy_parameters(situation)
    if parameters is None or situation.config is None:
        yield ok("memory", what)
        return
    needed = _least_memory(situation.config, parameters)
    fix = "take a larger host or a smaller model, or raise learner.num_ranks over more hosts"
    if needed > total:
        yield wrong("memory", f"{what}; weights and optimizer states alone take {size(needed)}", fix)
    elif needed > available:
        yield unsure("memory", f"{what}; weights and optimizer states alone take {size(needed)}", fix)
    else:
        yield ok("memory", f"{what}; weights and optimizer states take {size(needed)}")


def _least_memory(config: Config, parameters: int) -> int:
    """Of the host: what lies there for sure. Weights pass through it even on their way to a GPU."""
    learner, rollout = config.learner, config.rollout
    num_bytes = 4
    if learner.device == "cpu":
        num_bytes = 8 if learner.lora is not None else 8 + (4 if learner.optimizer.state_dtype == "bfloat16" else 8)
    if rollout.device == "cpu" and not rollout.server_urls:
        num_bytes += rollout.num_workers * (2 if config.model.dtype == "bfloat16" else 4)
    return parameters * num_bytes


def check_process_limit(situation: Situation) -> Iterator[Finding]:
    """Processes and threads that the container may have; there is nothing to say where it sets no limit."""
    most, now = cgroup_value("pids.max"), cgroup_value("pids.current") or 0
    if most is None:
        return
    left = most - now
    fix = "raise the container's limit of processes (docker run --pids-limit)"
    if left < _BASIC_PROCESSES:
        yield wrong("container", f"{left} more processes and threads may be started, of {most}", fix)
    elif left < _MANY_PROCESSES:
        yield unsure("container", f"{left} more processes and threads may be started, of {most}", fix)


def memory() -> tuple[int, int]:
    """Bytes in all and available, to this container where it has a limit."""
    total, available = meminfo("MemTotal"), meminfo("MemAvailable")
    most = cgroup_value("memory.max")
    if most is None or most >= total:
        return total, available
    return most, min(available, max(0, most - (cgroup_value("memory.current") or 0)))


def meminfo(name: str, file: Path = Path("/proc/meminfo")) -> int:
    """Bytes, by a name of the kernel's."""
    for line in file.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0


def cpu_quota(root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores that the control groups of this process may use together; None without a quota."""
    found = []
    for text in _cgroup_texts("cpu.max", root, membership):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            found.append(int(quota) / int(period))
    return min(found, default=None)


def cgroup_value(name: str, root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """The least of a number over the control groups of this process (version 2); None where there is none."""
    return min((int(text) for text in _cgroup_texts(name, root, membership) if text.strip().isdecimal()), default=None)


def _cgroup_texts(name: str, root: Path, membership: Path) -> Iterator[str]:
    """A file's content in this process's control group and in those above it."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    inner = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if inner is None:
        return
    group = root / inner
    for folder in (group, *group.parents):
        if folder.is_relative_to(root) and (folder / name).is_file():
            yield (folder / name).read_text(encoding="ascii")
