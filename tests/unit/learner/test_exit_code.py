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

def run(config, arguments, name):
    raise UnsavedError("the disk is full")

learner._run, last = run, Last()
code = learner.main()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(code)
"""

# Meets workers that never come. The objects keep the end of Python busy until the meeting times out.
_ENTRY = """
import asyncio, torch
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.manifest import build_manifest

MUCH = [{i: [i]} for i in range(2_000_000)]

async def main():
    manifest = build_manifest([("w", torch.zeros(8))], bucket_bytes=1000)
    sender = CollectiveSender(manifest, host="127.0.0.1", device=torch.device("cpu"), timeout_s=3.0)
    buckets = await sender.stage()
    await sender.offer(buckets, ["a worker"])
    sending = asyncio.create_task(sender.send(buckets))
    await asyncio.sleep(0.5)
    sending.cancel()

asyncio.run(main())
raise ValueError("the end")
"""


def _options(folder: Path) -> list[str]:
    fixed = ["--model-path=tiny", "--device=cpu", "--num-threads=1", "--wire=ipc:///x", "--metrics-port=0"]
    return [f"--run-folder={folder}", *fixed]


def test_a_hung_collective_does_not_replace_the_exit_code(tmp_path: Path) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(_ENTRY)
    config = load_config("quickstart.yaml", (f"run.entry={entry}",))
    (tmp_path / "config.yaml").write_text(dump_config(config))
    command = [sys.executable, "-m", "areal_rloo.learner", *_options(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, "ValueError: the end" in ended.stderr) == (2, True), ended.stderr


def test_a_signal_after_the_end_does_not_replace_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config("quickstart.yaml")))
    command = [sys.executable, "-c", _CODE, *_options(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == EXIT_UNSAVED, ended.stderr
