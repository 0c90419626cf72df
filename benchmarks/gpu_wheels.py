"""Wheels for a machine with a GPU and without a network: download them here, install them there; standard library only.

    python -m benchmarks.gpu_wheels [--python 3.12] [--folder .gpu-wheels]     # `make gpu-wheels`

Such a machine has torch, transformers and their needs. The other packages of pyproject.toml and of the tests are
downloaded for its version of Python, at the versions of constraints.txt. `complete_python` is for the machine: if a
package is missing, it makes an environment that sees all packages there, and installs only the missing ones from the
folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
THERE = {"torch", "transformers", "tokenizers", "safetensors", "numpy"}  # on a machine with a GPU; heavy, or for CUDA
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
_SEEN = """
import importlib.metadata, json, re
names = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
print(json.dumps([re.sub("[-_.]+", "-", name).lower() for name in names if name]))
"""


class MissingError(Exception):
    """A package is neither installed nor in the folder of wheels."""


def needed() -> list[str]:
    """List the packages of pyproject.toml and of the tests by name."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=!~\[; ]", requirement)[0].lower() for requirement in project["dependencies"]]
    return [*names, *FOR_TESTS]


def download(folder: Path, python: str) -> None:
    """Download what `needed` names beyond `THERE`, and the needs of these, as wheels."""
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    command += ["--constraint", str(REPO / "constraints.txt"), "--dest", str(folder)]
    subprocess.run([*command, *(name for name in needed() if name not in THERE)], check=True)
    wheels = sorted(folder.glob("*.whl"))
    print(f"{len(wheels)} wheels, {sum(path.stat().st_size for path in wheels) / 2**20:.1f} MiB: {folder}")


def complete_python(folder: Path) -> str:
    """Return a Python with all needed packages: this one, or that of an environment in the folder.

    Raises:
        MissingError: a package is missing here and in the folder, or one is missing that only the machine can have.
    """
    absent = missing(sys.executable)
    if not absent:
        return sys.executable
    if heavy := [name for name in absent if name in THERE]:
        raise MissingError(
            f"{sys.executable} has no {', '.join(heavy)}, which the wheels do not bring; take the Python that has "
            "them: make gpu-check PYTHON=..."
        )
    beside = hashlib.sha256(sys.executable.encode()).hexdigest()[:8]  # each Python sees packages of its own
    place = folder / f"python{sys.version_info.major}.{sys.version_info.minor}-{beside}"
    python = str(place / "bin" / "python")
    if not Path(python).exists():
        subprocess.run(
            [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(place)], check=True
        )
        _see_packages_of_this_python(python)
    _install(missing(python), folder, python)
    return python


def missing(python: str) -> list[str]:
    """List the needed packages that a Python does not have."""
    ended = subprocess.run([python, "-c", _SEEN], check=True, capture_output=True, text=True)
    return [name for name in needed() if name not in json.loads(ended.stdout)]


def _see_packages_of_this_python(python: str) -> None:
    """Show the environment our packages: its system is the Python below ours, if ours is an environment itself."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ended = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(ended.stdout.strip()) / "of_the_machine.pth").write_text("".join(f"{path}\n" for path in sorted(ours)))


def _install(names: list[str], folder: Path, python: str) -> None:
    """Install from the folder alone. pip sees the packages of the machine, and leaves them as they are."""
    if not names:
        return
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--find-links", str(folder), *names]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if ended.returncode:
        reason = ended.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise MissingError(
            f"missing packages {', '.join(names)}, and {folder} does not give them: {reason[0]}; run `make gpu-wheels` "
            "where there is a network, and carry the folder"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--folder", type=Path, default=REPO / ".gpu-wheels")
    arguments = parser.parse_args()
    download(arguments.folder, arguments.python)


if __name__ == "__main__":
    main()
