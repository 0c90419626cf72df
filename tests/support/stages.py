"""The stages as commands."""

import os
import subprocess
import sys
from pathlib import Path

from support.local_runs import REPO


def command(*words: str | Path, folder: Path) -> str:
    """Run `areal-rloo` in a folder; return the standard output."""
    cache = str(REPO / ".pytest_cache" / "models")
    ended = subprocess.run(
        [sys.executable, "-m", "areal_rloo", *map(str, words)],
        cwd=folder,
        env={**os.environ, "AREAL_RLOO_CACHE": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
