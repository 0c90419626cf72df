"""The alarms about processes and about the wire fire in a real run whose processes are in trouble.

The minutes of the rules are seconds.
"""

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.local_runs import REPO, SENDS_GARBAGE, Run, further_worker
from support.prometheus import assert_a_silent_end, prometheus, sooner
from support.strangers import lie_until_cut_off, processes_of, socket_files

from areal_rloo.wire.address import SocketFile

pytestmark = [
    *(pytest.mark.slow, pytest.mark.rare),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed here"),
]

# The user's episode: it blocks the worker's event loop once, or leaks memory, while a file of this name is there.
EPISODE = """
import time
from pathlib import Path

from areal_rloo.rollout.episode import SingleTurn

HERE = Path(__file__).parent
leaked = []

class Careless(SingleTurn):
    def __init__(self, config):
        pass

    async def run(self, *arguments):
        if (HERE / "hang").exists():
            (HERE / "hang").unlink()
            time.sleep(20)
        if (HERE / "leak").exists() and len(leaked) < 25:
            leaked.append(bytearray(b"x" * 20_000_000))
        return await super().run(*arguments)

def noise(completion_ids):
    return float(sum(completion_ids) % 2)
"""
# The ledger counts a group twice as soon as there is a file: a bug, which only changed code of ours can have.
ENTRY = """
from pathlib import Path

from areal_rloo.intake.ledger import Ledger

admit = Ledger.admit

def admit_twice(self, *arguments, **options):
    damage = Path(__file__).with_name("damage")
    if damage.exists():
        damage.unlink()
        self.totals.admitted += 1
    return admit(self, *arguments, **options)

Ledger.admit = admit_twice
"""


def stops_with_its_turn(worker: psutil.Process) -> bool:
    """Stop a worker; False, and the worker goes on, if the engine has just given the device to the learner."""
    worker.send_signal(signal.SIGSTOP)
    if re.search(rf"POSIX .* READ +{worker.pid} ", Path("/proc/locks").read_text()):
        return True
    worker.send_signal(signal.SIGCONT)
    return False


def test_each_trouble_of_processes_fires_its_alarm(start: Callable[..., Run], tmp_path: Path) -> None:
    episode, entry = tmp_path / "episode.py", tmp_path / "entry.py"
    episode.write_text(EPISODE)
    entry.write_text(ENTRY)
    run = start(
        *("learner.num_train_steps=100000", "rollout.num_workers=2", "evaluation.every_n_versions=0", "data.eval=null"),
        *(f"run.entry={entry}", f"rollout.episode.type={episode}:Careless"),
        f"data.train.rewards=[{{function: {episode}:noise}}]",
        *("rollout.share_devices=in_turns", "weights.timeout_s=2", "wire.heartbeat_timeout_s=1000"),
        *("rollout.num_slots=4", "launcher.hang_timeout_s=30"),  # too few slots for all samples: the liar gets others
    )
    run.wait_for(lambda: len(run.records()) >= 3)
    with prometheus(tmp_path, tmp_path / "targets", rules=sooner) as server:

        def fires(*names: str) -> None:
            run.wait_for(lambda: set(names) <= server.alarms())

        (tmp_path / "hang").touch()
        fires("Hang")
        (address,) = socket_files(processes_of(run.process.pid))
        assert lie_until_cut_off(SocketFile(address)) > 0
        fires("WorkerCutOff")
        with further_worker(run, SENDS_GARBAGE):
            fires("MessagesRefused")
        copy = tmp_path / "copy" / "areal_rloo"
        shutil.copytree(REPO / "areal_rloo", copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "__init__.py").write_text((copy / "__init__.py").read_text() + "\n# changed\n")
        with further_worker(run, f"import sys; sys.path.insert(0, {str(copy.parent)!r})") as other:
            fires("CodeDiffers")
            other.terminate()  # and Prometheus watches it no more
            assert other.wait(60) == 0
        stopped = run.children("areal_rloo.rollout")[0]
        run.wait_for(lambda: stops_with_its_turn(stopped))
        try:
            fires("WeightsDoNotArrive")
            fires("TurnMissed")
        finally:
            stopped.send_signal(signal.SIGCONT)
        (tmp_path / "leak").touch()
        fires("MemoryGrows")
        others = {"MemoryGrows", "Unhealthy"}  # a random model does not end its completions
        run.wait_for(lambda: server.alarms() <= others)
        (tmp_path / "damage").touch()
        fires("LedgerUnbalanced")
        assert_a_silent_end(server, run)
