"""Save checkpoints in processes that die while writing; print the progress of each.

    python -m support.checkpoints_to_kill CHECKPOINTS MODEL NUM

A child is forked for each death. It counts what it does with files (Python's audit events), and from a random event on,
Linux kills it (SIGXFSZ) at a random byte of a file, or the child kills itself at once. So the deaths are the same on
every machine, however busy.
"""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from support.checkpoints import checkpoint_state, trained

from areal_rloo.config import load_config
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.models.files import load_tokenizer

_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def _count_events(at: Callable[[int], None]) -> None:
    num = 0

    def hook(event: str, arguments: object) -> None:
        nonlocal num
        if event in _EVENTS:
            num += 1
            at(num)

    sys.addaudithook(hook)


def _die_at(event: int, num_bytes: int) -> None:
    """Die at the first byte beyond `num_bytes` of a file, from this event on; for 0, at the event."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def at(num: int) -> None:
        if num == event and num_bytes == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        elif num == event:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    _count_events(at)


def main() -> None:
    torch.set_num_threads(1)
    folder, model = Path(sys.argv[1]), Path(sys.argv[2])
    team, tokenizer, config = trained(model), load_tokenizer(str(model)), load_config("quickstart.yaml")

    def in_child(prepare: Callable[[], None]) -> int:
        """Save version 2 in a child; return its status."""
        child = os.fork()
        if child == 0:
            prepare()
            checkpoints = Checkpoints(folder)
            checkpoints.save(checkpoint_state(2), config=config, team=team, tokenizer=tokenizer)
            checkpoints.wait()
            os._exit(0)
        return os.waitpid(child, 0)[1]

    reading, writing = os.pipe()
    in_child(lambda: _count_events(lambda num: os.write(writing, b".") and None))
    num_events = len(os.read(reading, 65536))
    shutil.rmtree(folder / "step-000002")
    rng = np.random.default_rng(0)
    for _ in range(int(sys.argv[3])):
        event = int(rng.integers(1, num_events + 1))
        num_bytes = 0 if rng.random() < 0.3 else int(2 ** rng.uniform(0, 14))  # many files are small
        status = in_child(lambda event=event, num_bytes=num_bytes: _die_at(event, num_bytes))
        left = [path.stat().st_size for path in folder.glob(".unfinished-*/**/*") if path.is_file()]
        newest = Checkpoints(folder).load_newest()
        assert newest is not None, "there was one before"
        shutil.rmtree(folder / "step-000002", ignore_errors=True)  # whole before the blow: each begins alike
        sys.stdout.write(f"{int(os.WIFSIGNALED(status))} {sum(left)} {len(left)} {newest[0].name}\n")


if __name__ == "__main__":
    main()
