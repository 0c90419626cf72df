"""`python -m areal_rloo.launcher.doctor`: find what would end a run or slow it down, with a fix for each finding.

    doctor                                            this host
    doctor --config X.yaml [key=value ...]            this host, and the needs of that config

Prints each finding as soon as the check is done. Exit code 2 if a finding is `wrong`, else 0.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from areal_rloo.config import EXPECTED, Config, check_unique, import_entry, is_override, load_config
from areal_rloo.errors import PreflightError, UserError
from areal_rloo.launcher.doctor import Finding, Situation, findings, guarded
from areal_rloo.launcher.doctor.base import refused, unsure, wrong
from areal_rloo.launcher.doctor.inputs import check_loading, check_own_parts
from areal_rloo.launcher.epochs import with_steps
from areal_rloo.launcher.hosts import refused_here
from areal_rloo.launcher.run_folder import choose_folder
from areal_rloo.program import Parser, run_main


def main(arguments: Sequence[str]) -> int:
    """Run the checks, print the findings and their counts, give the exit code."""
    description = "Check this host and the needs of a config."
    parser = Parser(prog="areal-rloo doctor", description=description, overrides=True)
    parser.add_argument("--config", help="a path, or the name of a shipped config")
    parser.add_argument("--quick", action="store_true", help="only the checks that launchers make before a start")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    options, overrides = parser.parse_known_args(arguments)
    found = []
    try:
        for finding in _look(options, overrides):
            found.append(finding)
            if not options.json:
                _show(finding)
    except KeyboardInterrupt:
        return 130
    counts = Counter(finding.state for finding in found)
    if options.json:
        rows = [{"name": f.name, "state": f.state, "what": f.what, "fix": f.fix} for f in found]
        _print(msgspec.json.encode({"findings": rows, "counts": dict(counts)}).decode())
    else:
        _print(f"{counts['ok']} ok, {counts['wrong']} wrong, {counts['unsure']} unsure")
    return 2 if counts["wrong"] else 0


def _look(options: argparse.Namespace, overrides: Sequence[str]) -> Iterator[Finding]:
    for argument in overrides:
        if not is_override(argument) or options.config is None:
            what = f"argument '{argument}': expected {EXPECTED}, and --config before it"
            yield wrong("arguments", what, "see --help")
            return
    config: Config | None = None
    if options.config is not None:
        try:
            check_unique(overrides)
            config = load_config(options.config, overrides)
            import_entry(config.run.entry)
            config = with_steps(config)
        except UserError as error:
            yield refused("config", error, fix="correct it")
    folder = Path((config.run.folder if config is not None else None) or "runs").resolve()
    if config is not None:
        yield from guarded(check_start, Situation(config, folder))
    yield from findings(config, folder=folder, thorough=not options.quick)
    if config is not None:
        yield from guarded(check_own_parts, Situation(config, folder))
        yield from guarded(check_loading, Situation(config, folder))


def check_start(situation: Situation) -> Iterator[Finding]:
    """Say which starts of this config would be refused, though others would not."""
    try:
        choose_folder(situation.config, resume=False)
    except UserError as error:
        yield _refused_start("run.folder", "without --resume", error)
    if words := refused_here(situation.config.launcher):
        yield _refused_start("launcher.num_hosts", "with the local launcher", PreflightError(words))


def _refused_start(key: str, how: str, error: UserError) -> Finding:
    found = refused(key, error, fix="change it")
    return unsure(key, f"a start {how} would be refused: {found.what}", found.fix)


def _show(finding: Finding) -> None:
    """Print a finding, each text on a line."""
    _print(f"{finding.state:<7} {finding.name}: {' '.join(finding.what.split())}")
    if finding.fix:
        _print(f"        fix: {' '.join(finding.fix.split())}")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the face of the program


if __name__ == "__main__":
    sys.exit(run_main(main))
