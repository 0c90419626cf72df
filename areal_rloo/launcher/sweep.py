"""`areal-rloo sweep --config X.yaml --over KEY=V1,V2 ...`: a run for each combination of values, and one report.

    values ─► combinations, each checked ─► runs, `--parallel` at a time ─► comparison.html

Each run is a process of `areal-rloo run` with a folder in the folder of the sweep. The same command with `--folder`
goes on: finished runs stay, and stopped runs resume. Other options for a finished run are refused.
"""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from areal_rloo.config import Config, check_overrides, check_unique, dump_config, load_config, override_of
from areal_rloo.config.resume import changes
from areal_rloo.errors import ConfigError, DataError, PreflightError, shown
from areal_rloo.files import write_atomically
from areal_rloo.launcher.job import Signals
from areal_rloo.launcher.run import launcher_of
from areal_rloo.launcher.run_folder import has_begun, is_finished, newest_submitted
from areal_rloo.parent_death import bound_to_this_process
from areal_rloo.program import Parser
from areal_rloo.report.comparison import write_comparison
from areal_rloo.session_leader import SessionLeader

_MOST_RUNS = 1000
_OPTIONS = ".options"  # in the folder of a sweep: the config of each run, as the command asked for it
_MOST_NAME = 60
_LOOK_EVERY_S = 0.2
_PIECE = re.compile(r"""[^,\[\]{}"']|"[^"]*"|'[^']*'""")  # of a value: a character, or a text in quotes
_EXAMPLES = """
examples:
  areal-rloo sweep --config quickstart.yaml --over learner.optimizer.learning_rate=1e-4,3e-4 --over run.seed=0,1,2
  areal-rloo sweep --config math_rloo.yaml --over algorithm.preset=rloo,grpo --launcher slurm launcher.num_hosts=2

With --launcher slurm, each run is a job, and the report is left to `areal-rloo report FOLDER/*`."""


class _Run(NamedTuple):
    """A combination: the name of the folder, and the options that make it."""

    name: str
    options: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Run all combinations; return 0 if every run ended with 0, else the first other exit code.

    Raises:
        UserError: an option or a combination is wrong; nothing was started.
    """
    parser = Parser(
        prog="areal-rloo sweep",
        description="Train with each combination of several values, with one report over all.",
        epilog=_EXAMPLES,
        overrides=True,
    )
    parser.add_argument("--config", required=True, help="a path, or the name of a shipped config")
    parser.add_argument("--over", required=True, action="append", metavar="KEY=V1,V2", help="an option with its values")
    parser.add_argument("--launcher", help="local, slurm or ray")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time; default: 1")
    parser.add_argument("--folder", type=Path, help="of all runs; default: runs/sweep-TIME")
    parser.add_argument("--dry-run", action="store_true", help="check and list the combinations, start nothing")
    options, rest = parser.parse_known_args(arguments)
    check_overrides(rest)
    for argument in (*rest, *options.over):
        if argument.removeprefix("--").startswith(("run.name=", "run.folder=")):
            raise ConfigError(f"override '{shown(argument)}': the sweep names its runs; set --folder")
    if options.parallel < 1:
        raise ConfigError(f"argument '--parallel': expected at least 1, got {options.parallel}")
    launcher = launcher_of([] if options.launcher is None else [f"--launcher={options.launcher}"])[0] or "local"
    folder = (options.folder or Path("runs") / f"sweep-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    runs = combinations(options.over)
    commands = [run._replace(options=(*run.options, *rest)) for run in runs]
    configs: dict[Path, Config] = {}  # by file
    for run in commands:
        check_unique(run.options)
        noted = folder / _OPTIONS / f"{run.name}.yaml"
        configs[noted] = load_config(options.config, run.options)
        _check_same(folder / run.name, noted, configs[noted])
    if options.dry_run:
        _say("\n".join(f"{folder / run.name}: {' '.join(run.options)}" for run in runs))
        return 0
    for noted, config in configs.items():
        _note(noted, config)
    begin = (sys.executable, "-m", "areal_rloo", "run", f"--launcher={launcher}", "--config", options.config)
    codes, signals = _run_all(commands, begin, folder, options.parallel)
    _say(f"{sum(code == 0 for code in codes.values())} of {len(runs)} runs ended with exit code 0")
    _report(folder, runs, submitted=launcher == "slurm")
    if signals.any:
        return 130
    return next((code for code in codes.values() if code != 0), 0)


def _check_same(own: Path, noted: Path, config: Config) -> None:
    """Check that a finished run of this sweep has the options of now; the others resume, by the rules for that.

    Raises:
        ConfigError: it has others.
    """
    if not noted.exists() or not is_finished(own):
        return
    for other in changes(load_config(str(noted)), config):
        raise ConfigError(
            f"argument '--folder': {own} has finished with other options: {other.key} {other.values}; "
            "give the options of that run, or another --folder"
        )


def _note(noted: Path, config: Config) -> None:
    try:
        noted.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(noted, dump_config(config).encode())
    except OSError as error:
        raise PreflightError(f"argument '--folder': {noted} cannot be written: {error.strerror}") from error


def combinations(over: Sequence[str]) -> list[_Run]:
    """Return a run for each combination; `over` are keys with values, as `KEY=V1,V2`.

    Raises:
        ConfigError: a key is given twice, has no value or a value twice, or there are too many combinations.
    """
    check_unique(over)
    values: list[list[tuple[str, str]]] = []
    for text in over:
        key, _, listed = text.partition("=")
        found = split(listed)
        if not key or not all(found):
            raise ConfigError(f"argument '--over {shown(text)}': expected KEY=V1,V2 without an empty value")
        if len(set(found)) < len(found):
            raise ConfigError(f"argument '--over {shown(text)}': expected each value once")
        values.append([(key, value) for value in found])
    chosen = list(itertools.islice(itertools.product(*values), _MOST_RUNS + 1))
    if len(chosen) > _MOST_RUNS:
        raise ConfigError(f"argument '--over': expected at most {_MOST_RUNS} combinations, got more; leave values out")
    digits = len(str(len(chosen)))
    return [
        _Run(_name(f"{number:0{digits}d}", pairs), tuple(f"{key}={value}" for key, value in pairs))
        for number, pairs in enumerate(chosen, start=1)
    ]


def split(text: str) -> list[str]:
    """Split values at commas, but not inside brackets or quotes: `1e-5,1e-4`, `[0.9,0.95],[0.9,0.99]`."""
    parts, depth, place = [""], 0, 0
    while place < len(text):
        found = _PIECE.match(text, place)
        piece = found[0] if found else text[place]
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(piece, 0)
        if piece == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += piece
        place += len(piece)
    return parts


def _name(number: str, pairs: Sequence[tuple[str, str]]) -> str:
    words = "+".join(f"{key.rpartition('.')[2]}={value}" for key, value in pairs)
    return f"{number}-{re.sub(r'[^A-Za-z0-9_.+=@-]+', '-', words)}"[:_MOST_NAME]


def _run_all(runs: Sequence[_Run], begin: Sequence[str], folder: Path, most: int) -> tuple[dict[str, int], Signals]:
    """Run all; a signal goes to the runs of the moment, and no further run begins. Returns exit codes by name."""
    signals, handed = Signals().install(), 0
    waiting, running, codes = list(runs), dict[str, SessionLeader](), dict[str, int]()
    while running or (waiting and not signals.any):
        if waiting and len(running) < most and not signals.any:
            run = waiting.pop(0)
            if is_finished(folder / run.name):
                _say(f"{run.name}: finished before")
                codes[run.name] = 0
            else:
                running[run.name] = _started(run, begin, folder, shares=most > 1)
            continue
        while handed < signals.num_ends:
            handed += 1
            for leader in running.values():
                leader.signal(signal.SIGINT)
        for name, code in [(name, leader.exit_code()) for name, leader in running.items()]:
            if code is not None:
                _say(f"{name}: exit code {code}")
                codes[name] = code
                del running[name]
        time.sleep(_LOOK_EVERY_S)
    return codes, signals


def _started(run: _Run, begin: Sequence[str], folder: Path, *, shares: bool) -> SessionLeader:
    """Start a run; with several at a time (`shares`), its terminal is a file beside its folder."""
    own = folder / run.name
    folder.mkdir(parents=True, exist_ok=True)
    named = [override_of("run.folder", own), override_of("run.name", run.name)]
    resumes = ["--resume"] if has_begun(own) or newest_submitted(own) else []
    _say(f"{run.name}: {'resumes' if resumes else 'starts'}")
    command = bound_to_this_process([*begin, *run.options, *named, *resumes], signal.SIGTERM)
    if not shares:
        return SessionLeader(subprocess.Popen(command, start_new_session=True), kills_session=False)
    with (folder / f"{run.name}.out").open("ab") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    return SessionLeader(child, kills_session=False)


def _report(folder: Path, runs: Sequence[_Run], *, submitted: bool) -> None:
    if submitted:
        _say(f"after the jobs: areal-rloo report {folder}/*")
        return
    trained = list(_with_records(folder, runs))
    if not trained:
        return
    try:
        _say(str(write_comparison(trained, folder / "comparison.html")))
    except DataError as error:
        _say(f"no report: {error}")


def _with_records(folder: Path, runs: Sequence[_Run]) -> Iterator[Path]:
    return (folder / run.name for run in runs if (folder / run.name / "metrics.jsonl").is_file())


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the face of the program
