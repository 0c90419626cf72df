"""Two networks on this host, joined by a virtual cable, so processes in them communicate like two hosts.

Nothing comes in; two network namespaces with an address each go out, and are removed at the end together with the
cable. Root only. `nsenter` enters them, not `ip netns exec`, which also mounts another /sys, under which Slurm's node
daemon does not start.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """A network; a command with `prefix` in front runs in this network."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.name}", "--"]


@dataclass(frozen=True)
class TwoNetworks:
    """Both networks; `cut` disconnects the cable and `mend` connects the cable again."""

    first: Network
    second: Network

    def cut(self) -> None:
        _ip("-n", self.first.name, "link", "set", CABLE_END, "down")

    def mend(self) -> None:
        _ip("-n", self.first.name, "link", "set", CABLE_END, "up")


CABLE_END = "cable"
CAN_MAKE_NETWORKS = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("nsenter") is not None


@contextlib.contextmanager
def two_networks() -> Iterator[TwoNetworks]:
    with contextlib.ExitStack() as stack:
        number = _claim_names(stack)
        networks = TwoNetworks(
            first=Network(name=_name(number, 1), address=f"10.77.{number}.1"),
            second=Network(name=_name(number, 2), address=f"10.77.{number}.2"),
        )
        cable = [CABLE_END, "netns", networks.first.name, "type", "veth"]
        _ip("link", "add", *cable, "peer", "name", CABLE_END, "netns", networks.second.name)
        for network in (networks.first, networks.second):
            _ip("-n", network.name, "address", "add", f"{network.address}/24", "dev", CABLE_END)
            _ip("-n", network.name, "link", "set", CABLE_END, "up")
            _ip("-n", network.name, "link", "set", "lo", "up")
        yield networks


def _name(number: int, side: int) -> str:
    return f"areal-rloo-{number}-{side}"


def _claim_names(stack: contextlib.ExitStack) -> int:
    """Add both namespaces under the first free number: adding fails where another test holds the name."""
    for number in range(1, 255):
        added = subprocess.run(["ip", "netns", "add", _name(number, 1)], capture_output=True, text=True, check=False)
        if added.returncode == 0:
            stack.callback(_ip, "netns", "delete", _name(number, 1))
            _ip("netns", "add", _name(number, 2))
            stack.callback(_ip, "netns", "delete", _name(number, 2))
            return number
        if "File exists" not in added.stderr:
            raise RuntimeError(f"no network namespace can be added: {added.stderr}")
    raise RuntimeError("254 pairs of networks are in use; remove leftovers with: ip netns delete NAME")


def _ip(*arguments: str) -> None:
    ended = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {ended.stderr}")
