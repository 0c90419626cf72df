"""Memory, cores and processes within the limits of the container, from the control groups (version 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def memory() -> tuple[int, int]:
    """Give the total and the available bytes, within the container's limit."""
    host, most = psutil.virtual_memory(), cgroup_value("memory.max")
    if most is None or most >= host.total:
        return host.total, host.available
    return most, min(host.available, max(0, most - (cgroup_value("memory.current") or 0)))


def cpu_quota(root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Give the quota of cores in the control groups of this process; None without a quota."""
    found = []
    for text in _cgroup_texts("cpu.max", root, membership):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            found.append(int(quota) / int(period))
    return min(found, default=None)


def cgroup_value(name: str, root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Give the lowest value over the control groups (version 2) of this process; None without a value."""
    return min((int(text) for text in _cgroup_texts(name, root, membership) if text.strip().isdecimal()), default=None)


def _cgroup_texts(name: str, root: Path, membership: Path) -> Iterator[str]:
    """Read a file of the control group of this process, and of all parent groups."""
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
