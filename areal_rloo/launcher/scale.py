"""`python -m areal_rloo.launcher.scale RUN_FOLDER --workers N`: change the number of rollout workers of a running run.

Leaves a wish in the run folder, and waits for the answer of the run's launcher (fleet.py). Exit code 2 if the launcher
refuses. A start with --resume has the number of workers of the config again.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from areal_rloo.config import check_launched, load_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.fleet import Wish, ask, check_number, is_asked, read_answer
from areal_rloo.learner.lock import is_in_use
from areal_rloo.program import Parser, run_main
from areal_rloo.waiting import wait_until

_ANSWER_TIMEOUT_S = 90.0  # an earlier change may have to drain workers first
_LOOK_EVERY_S = 0.1


def main(arguments: Sequence[str]) -> int:
    """Ask the launcher; give 0 once it has begun to change the number.

    Raises:
        UserError: the folder has no running run, or the launcher refuses.
    """
    parser = Parser(prog="areal-rloo scale", description="Change a running run.")
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="such as runs/latest")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="the number of rollout workers")
    options = parser.parse_args(arguments)
    folder = options.run_folder.resolve()
    check_launched(folder)
    check_number(options.workers, load_config(str(folder / "config.yaml")))
    if not is_in_use(folder, "launcher"):
        raise PreflightError(
            f"{folder}: no launcher runs here; start it: areal-rloo resume {folder} rollout.num_workers=N"
        )
    wish = Wish(uuid.uuid4().hex, options.workers)

    def is_settled() -> bool:
        if not is_asked(folder):
            ask(folder, wish)
        return read_answer(folder, wish) is not None or not is_in_use(folder, "launcher")

    try:
        ask(folder, wish)
        wait_until(is_settled, timeout_s=_ANSWER_TIMEOUT_S, look_every_s=_LOOK_EVERY_S)
    except OSError as error:
        raise PreflightError(f"{folder} cannot be written: {error}; free some disk") from error
    answer = read_answer(folder, wish)
    if answer is None:
        raise PreflightError(f"{folder}: the launcher has not answered yet; see logs/launcher.log")
    if answer.refusal is not None:
        raise PreflightError(answer.refusal)
    print(f"the run in {folder} gets {options.workers} rollout workers")  # noqa: T201 - the face of the program
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
