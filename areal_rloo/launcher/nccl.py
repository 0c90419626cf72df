"""NCCL here and in the environment of a server: a process group of two versions does not form.

All ranks of a group compare their versions (`initTransportsRank` in NCCL's src/init.cc). The versions are read from the
metadata of pip, without an import of torch. A torch without NCCL of pip, as of conda, has an unknown version.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from areal_rloo.config import Config
from areal_rloo.engines.installed import find_python, package_of
from areal_rloo.errors import ConfigError, EngineError, PreflightError
from areal_rloo.launcher.placement import Host, gpus_each, shares_gpus

_TIMEOUT_S = 60.0
_LIST = """
from importlib.metadata import distributions
for found in distributions():
    name = (found.metadata["Name"] or "").lower().replace("_", "-")
    if name == "torch" or name.startswith("nvidia-nccl-cu"):
        print(name, found.version.partition("+")[0])
"""


@dataclass(frozen=True, slots=True)
class Nccl:
    """The packages of an environment, as pip spells them."""

    version: str
    package: str
    torch: str

    @property
    def install(self) -> str:
        return f"'torch=={self.torch}' '{self.package}=={self.version}'"


@dataclass(frozen=True, slots=True)
class Pair:
    """NCCL here and of the server's Python; None: unknown."""

    here: Nccl | None
    there: Nccl | None
    python: str  # of the server

    @property
    def differs(self) -> bool:
        return self.here is not None and self.there is not None and self.here.version != self.there.version

    @property
    def words(self) -> str:
        here, there = self.here, self.there
        if here is None or there is None:
            lacks = " and ".join(python for python, nccl in ((sys.executable, here), (self.python, there)) if not nccl)
            return f"the version of NCCL in {lacks} is unknown, and a group of two versions does not form"
        if not self.differs:
            return f"{here.version}, here and in {self.python}"
        return (
            f"a group of NCCL {here.version} (torch {here.torch}, here) and NCCL {there.version} (torch "
            f"{there.torch} of {self.python}) does not form"
        )

    @property
    def fix(self) -> str:
        if self.there is None or not self.differs:
            return "compare torch.cuda.nccl.version() of both"
        return f"{sys.executable} -m pip install {self.there.install}"


def pair_of(config: Config, hosts: Sequence[Host], *, same_host: bool) -> Pair | None:
    """Look up both versions; None if no server of ours gets weights by NCCL, or the server's Python is not here.

    The Python is looked up on this host, so the answer is about the run if all hosts have the same environments.
    """
    engine, server = config.rollout.engine, config.rollout.server
    if engine == "embedded" or server is None or server.urls or config.launcher.container.runtime != "none":
        return None
    if not all(gpus_each(config, hosts)) or shares_gpus(config, hosts):
        return None
    if config.weights_transport(same_host=same_host) != "collective" or config.publishes_adapters:
        return None
    try:
        python = find_python(package_of(engine), server, on_gpus=True)
    except (ConfigError, EngineError):
        return None  # the doctor's check of the server reports the error
    return Pair(_installed(sys.executable), _installed(python), python)


def with_transport(config: Config, hosts: Sequence[Host]) -> tuple[Config, str]:
    """Send the weights through files where NCCL cannot; give the words about the choice, empty without a choice.

    Args:
        config: without `auto` of counts and devices.
        hosts: with a process of the run.

    Raises:
        PreflightError: the versions differ, and no other transport is possible or allowed.
    """
    same_host = len(hosts) == 1
    pair = pair_of(config, hosts, same_host=same_host)
    if pair is None or not pair.differs:
        return config, ""
    if not same_host or config.weights.transport != "auto":
        raise PreflightError(f"weights.transport: {refusal(pair, same_host=same_host)}")
    weights = msgspec.structs.replace(config.weights, transport="shared_memory")
    words = f"weights.transport: {pair.words}, so weights go through files; to use NCCL: {pair.fix}"
    return msgspec.structs.replace(config, weights=weights), words


def refusal(pair: Pair, *, same_host: bool) -> str:
    files = ", or set weights.transport=shared_memory" if same_host else ""
    return f"{pair.words}; {pair.fix}{files}"


def _installed(python: str) -> Nccl | None:
    """Read the packages of a Python; None if there are several versions of NCCL, or none."""
    try:
        asked = subprocess.run(
            [python, "-c", _LIST], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found: dict[str, str] = {}
    for line in asked.stdout.splitlines():
        name, _, version = line.partition(" ")
        found.setdefault(name, version)  # the first in the path is imported
    torch = found.pop("torch", None)
    if torch is None or len(found) != 1:
        return None
    ((package, version),) = found.items()
    return Nccl(version, package, torch)
