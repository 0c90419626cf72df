"""The nodes of the Slurm job that we are in, as hosts: names, addresses, and our share of each."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import socket
import subprocess

from areal_rloo.config import LauncherConfig, is_loopback
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.hosts import capped
from areal_rloo.launcher.placement import Host

_MIB = 2**20


def allocated_hosts(launcher: LauncherConfig) -> list[Host]:
    """In Slurm's order, so that the first is where the job's script runs.

    Raises:
        PreflightError: this is no Slurm job, or a node's address is unknown here.
    """
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    if nodelist is None:
        raise PreflightError(
            "SLURM_JOB_NODELIST: not set; this runs inside a job that areal_rloo.launcher.slurm submits"
        )
    names = _scontrol("show", "hostnames", nodelist).split()
    cores = counts_per_node(os.environ["SLURM_JOB_CPUS_PER_NODE"])
    described = _scontrol("--oneliner", "show", "node", nodelist)
    addresses = dict(re.findall(r"NodeName=(\S+).*?NodeAddr=(\S+)", described))
    memory = {name: int(mib) * _MIB for name, mib in re.findall(r"NodeName=(\S+).*?RealMemory=(\d+)", described)}
    share = int(os.environ.get("SLURM_MEM_PER_NODE", "0")) * _MIB
    gpus = launcher.gpus_per_host
    num_gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) if gpus is None else gpus
    gpu_ids = tuple(str(index) for index in range(num_gpus))  # a step sees its job's GPUs, counted from 0
    hosts = [
        Host(name, _resolved(name, addresses.get(name, name)), cores[index], gpu_ids, share or memory.get(name, 0))
        for index, name in enumerate(names)
    ]
    return [capped(_reachable(host, hosts), launcher) for host in hosts]


def counts_per_node(written: str) -> list[int]:
    """Slurm's `4(x2),8`, as 4, 4, 8."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", written):
        counts += [int(count)] * int(times or 1)
    return counts


def _resolved(name: str, address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(address)
    except OSError as error:
        raise PreflightError(f"node {name}: its address {address} cannot be resolved here: {error}") from error


def _reachable(host: Host, hosts: list[Host]) -> Host:
    """A machine may know its own name as loopback, as Debian has it: then it is the address on the way to others."""
    others = [other.address for other in hosts if not is_loopback(other.address)]
    if not is_loopback(host.address) or not others:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((others[0], 1))
        return dataclasses.replace(host, address=str(probe.getsockname()[0]))


def _scontrol(*arguments: str) -> str:
    ended = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise PreflightError(f"scontrol {' '.join(arguments)}: {' '.join(ended.stderr.split())}")
    return ended.stdout
