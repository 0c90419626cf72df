"""Save checkpoints in processes that are killed while writing; print the progress of each.

    python -m support.checkpoints_to_kill CHECKPOINTS MODEL OFFSETS...

A child is forked for each offset, and dies (SIGKILL) as soon as it has written so many bytes of version 2.
"""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import torch
from support.checkpoints import checkpoint_state, trained

from areal_rloo.config import load_config
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.models.files import load_tokenizer


def _written_bytes() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


def _die_at(offset: int) -> None:
    before = _written_bytes()
    while _written_bytes() - before < offset:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    torch.set_num_threads(1)
    folder, model = Path(sys.argv[1]), Path(sys.argv[2])
    team, tokenizer, config = trained(model), load_tokenizer(str(model)), load_config("quickstart.yaml")
    for offset in map(int, sys.argv[3:]):
        child = os.fork()
        if child == 0:
            threading.Thread(target=_die_at, args=(offset,), daemon=True).start()
            checkpoints = Checkpoints(folder, keep=2)
            checkpoints.save(checkpoint_state(2), config=config, team=team, tokenizer=tokenizer)
            checkpoints.wait()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        left = sorted(folder.glob(".unfinished-*/**/*"))
        sizes = [path.stat().st_size for path in left if path.is_file()]
        newest = Checkpoints(folder, keep=2).load_newest()
        assert newest is not None, "there was one before"
        shutil.rmtree(folder / "step-000002", ignore_errors=True)  # whole before the blow: each begins alike
        sys.stdout.write(f"{int(os.WIFSIGNALED(status))} {sum(sizes)} {len(sizes)} {newest[0].name}\n")


if __name__ == "__main__":
    main()
