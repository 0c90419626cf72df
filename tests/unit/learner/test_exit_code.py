"""The exit code of the learner, which the launcher reads."""

import subprocess
import sys
from pathlib import Path

from areal_rloo.config import dump_config, load_config
from areal_rloo.errors import EXIT_UNSAVED

_CODE = """
import os, signal, sys
from areal_rloo.errors import UnsavedError
from areal_rloo.learner import __main__ as learner

class Last:
    def __del__(self):  # after the handlers of Python are gone
        os.kill(os.getpid(), signal.SIGTERM)

def run(config, arguments):
    raise UnsavedError("the disk is full")

learner._run, last = run, Last()
code = learner.main()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(code)
"""


def test_a_signal_after_the_end_does_not_replace_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config("quickstart.yaml")))
    options = ["--model-path=tiny", "--device=cpu", "--num-threads=1", "--wire=ipc:///x", "--metrics-port=0"]
    command = [sys.executable, "-c", _CODE, f"--run-folder={tmp_path}", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == EXIT_UNSAVED, ended.stderr
