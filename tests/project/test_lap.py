"""Walk the tables of one lap in README.md and ARCHITECTURE.md: a lap with real parts runs exactly these files."""

import re
from pathlib import Path

from support.lap import PACKAGE, files_of_a_lap

REPO = PACKAGE.parent
# The test itself takes the place of the learner's loop.
NOT_RUN = {"learner/loop.py"}
# Named below the table in ARCHITECTURE.md: a reader can skip them.
BESIDE = (
    *("engines/", "tasks/", "rewards/pool.py", "rewards/process.py", "rewards/outage.py", "rollout/deadline.py"),
    *("rollout/partial.py", "telemetry/trace.py"),
    *("wire/turns.py", "wire/token_rules.py", "wire/peers.py", "wire/address.py", "wire/envelope.py"),
    *(
        "intake/evaluation.py",
        "intake/fleet.py",
        "intake/worker.py",
        "intake/lies.py",
        "intake/work.py",
        "intake/queues.py",
        "intake/reward_failures.py",
        "weights/offers.py",
        "weights/commands.py",
    ),
    *("learner/parallel/", "learner/team.py", "algorithm/diagnostics.py"),
    *(
        "algorithm/kl.py",
        "algorithm/behaviour_weight.py",
        "learner/costs.py",
        "learner/adapters.py",
        "models/head.py",
        "models/capped_attention.py",
        "models/device.py",
        "models/sizes.py",
        "config/",
        "decoding.py",
    ),
    *("waiting.py", "loop_thread.py"),
)
MOST_FILES, MOST_LINES = 31, 6_650  # both ends of the protocol are state machines, apart from their I/O


def _table(document: str) -> list[str]:
    text = (REPO / document).read_text()
    table = text[text.index("lap of the loop") :]
    table = table[table.index("|") :].partition("\n\n")[0]
    return [path.removeprefix("areal_rloo/") for path in re.findall(r"`([\w/]+\.py)`", table)]


def test_both_tables_name_the_same_files_in_the_same_order() -> None:
    assert _table("README.md") == _table("ARCHITECTURE.md")


def test_a_lap_runs_through_the_files_of_the_table(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    lap, ran = set(_table("ARCHITECTURE.md")), files_of_a_lap(tiny_folders["qwen2"], tmp_path)
    assert lap - ran - NOT_RUN == set(), "files of the table that no lap needs"
    assert {path for path in ran - lap if not path.startswith(BESIDE)} == set(), "files of a lap that no table names"


def test_a_lap_has_limited_files_and_lines() -> None:
    lap = _table("ARCHITECTURE.md")
    assert len(lap) <= MOST_FILES
    assert sum(len((PACKAGE / path).read_text().splitlines()) for path in lap) <= MOST_LINES
