"""The sandbox of a user without the rights of root, who cannot look at the descriptors of a locked program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_rloo.errors import PreflightError
from areal_rloo.tasks.tools.sandbox import check_sandbox

NOBODY = 65534
PROGRAM = "for n in range(10**9): open(f'{n % 100}', 'wb').write(b'x' * 500_000)"
TRIAL = f"""
import asyncio
from areal_rloo.tasks.tools.sandbox import SandboxLimits, run_python
limits = SandboxLimits(max_file_bytes=1 << 20, wall_s=60, cpu_s=60)
print(asyncio.run(run_python({PROGRAM!r}, limits)).exit_reason)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user; for others, all tests of the sandbox are")
def test_the_limits_of_files_hold_without_the_rights_of_root(tmp_path: Path) -> None:
    try:
        check_sandbox()
    except PreflightError as error:
        pytest.skip(str(error))
    tmp_path.chmod(0o777)
    command = [sys.executable, "-c", TRIAL]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": "/tmp"}
    ended = subprocess.run(
        command,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if "Permission denied" in ended.stderr or "No module named" in ended.stderr:
        pytest.skip("another user cannot read this environment")
    assert ended.stdout == "killed\n", ended.stderr
