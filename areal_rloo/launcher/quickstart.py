"""`areal-rloo quickstart [key=value ...]`: the launcher of this host with the config of the quickstart."""

from __future__ import annotations

from collections.abc import Sequence

from areal_rloo.launcher import run

_HELP = """\
usage: areal-rloo quickstart [--dry-run] [--resume] [key.path=value ...]

Train a tiny model to add, in minutes on a laptop without a GPU: the whole loop with the config quickstart.yaml. The
first start makes the model, which takes one to four minutes more. Options of `areal-rloo run` may follow.

examples:
  areal-rloo quickstart
  areal-rloo quickstart learner.num_train_steps=6
  areal-rloo quickstart algorithm.preset=grpo algorithm.max_staleness=2"""


def main(arguments: Sequence[str]) -> int:
    """Run the quickstart; return the exit code of the launcher.

    Raises:
        UserError: an option is wrong, or the launcher refuses to start.
    """
    if {"-h", "--help"} & set(arguments):
        print(_HELP)  # noqa: T201 - the face of the program
        return 0
    return run.main(["--config", "quickstart.yaml", *arguments])
