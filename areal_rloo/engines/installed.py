"""The packages of the servers, and the Python that has one; without torch, so a launcher answers at once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Final, Literal

from areal_rloo.config import ServerConfig
from areal_rloo.errors import ConfigError, EngineError
from areal_rloo.keeper import was_killed

_VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerPackage:
    """The package of a kind of server.

    Attributes:
        name: as in messages.
        key: section of the config.
        distribution: Python package of the server.
        folder: where `make` puts an environment of its own, relative to the current folder.
        tested_version: of the package.
        shim: module of an environment from `make`, for machines without a GPU.
        label: path of a GET for the server's name for the weights, as `weight_version` of a JSON object.
        health: path of a GET; answers only if the engine behind the server answers.
        cpu_heads: lengths of heads for attention on a CPU; empty: all.
    """

    name: str
    key: str
    distribution: str
    folder: str
    tested_version: str
    shim: str
    label: str
    health: str
    cpu_heads: tuple[int, ...] = ()


SGLANG: Final = ServerPackage(
    "SGLang",
    "rollout.sglang",
    "sglang",
    folder=".venv-sglang",
    tested_version="0.5.23",
    shim="areal_rloo_sglang",
    label="/model_info",
    health="/health",
)
VLLM: Final = ServerPackage(
    "vLLM",
    "rollout.vllm",
    "vllm",
    folder=".venv-vllm",
    tested_version="0.32.0",
    shim="areal_rloo_vllm_forks",
    label="/weight_info",
    health="/is_paused",  # /health asks the engine nothing
    cpu_heads=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
)


def package_of(engine: Literal["sglang", "vllm"]) -> ServerPackage:
    return SGLANG if engine == "sglang" else VLLM


def remedy(package: ServerPackage, *, on_gpus: bool) -> str:
    """Return how to install the server, for messages."""
    apart = f"in an environment of its own and name its bin/python as {package.key}.python (docs/engines.md)"
    install = f"pip install '{package.distribution}=={package.tested_version}' {apart}"
    return (
        f"run {install}" if on_gpus else f"run make {package.distribution} (for a machine without GPUs), or {install}"
    )


def find_python(package: ServerPackage, config: ServerConfig, *, on_gpus: bool) -> str:
    """Return the Python that runs the server.

    Raises:
        ConfigError: there is no such Python, none with the server, or only an environment from `make`, for machines
            without a GPU, although the server runs on GPUs.
        EngineError: the Python was killed, or does not answer: another try may succeed.
    """
    distribution, key = package.distribution, f"{package.key}.python"
    # The distribution, not the module: any folder of that name on the path can be imported as a namespace package.
    if config.python is None and any(distributions(name=distribution)):
        return sys.executable
    python = config.python or str(Path(package.folder).absolute() / "bin" / "python")
    fix = remedy(package, on_gpus=on_gpus)
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"{key}: expected a Python that has {distribution}, found none at {python}; {fix}", absent=True
        )
    ask = (
        "from importlib.metadata import version; from importlib.util import find_spec; "
        f"version({distribution!r}); print(find_spec({package.shim!r}) and 'for CPUs')"
    )
    try:
        asked = subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise ConfigError(f"{key}: {python} cannot be run: {error}; {fix}") from error
    except subprocess.TimeoutExpired as error:
        words = f"{python} does not say within {_VERSION_TIMEOUT_S:.0f} s if it has {distribution}"
        raise EngineError(f"{key}: {words}; is the machine, or the disk of this Python, busy?") from error
    if was_killed(asked.returncode):
        raise EngineError(
            f"{key}: {python} was killed by signal {-asked.returncode} before it said if it has {distribution}"
        )
    if asked.returncode != 0:
        raise ConfigError(f"{key}: {python} has no {distribution}; {fix}", absent=True)
    if on_gpus and asked.stdout.strip() == "for CPUs":
        what = f"{python} has the {package.name} of make {distribution}, which uses no GPU"
        raise ConfigError(f"{key}: {what}; {fix}", absent=True)
    return python


def find_api_key(package: ServerPackage, config: ServerConfig) -> str | None:
    """Return the key of external servers; None if they have no key.

    Raises:
        ConfigError: the environment variable is not set.
    """
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(
            f"{package.key}.api_key_env: expected the servers' key in the environment variable {config.api_key_env}, "
            "got nothing; set it, or leave the option out for servers without a key"
        )
    return key
