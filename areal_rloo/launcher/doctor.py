"""`python -m areal_rloo.launcher.doctor`: what would end a run or slow it down, and what to do about each of it.

    doctor                                            this host
    doctor --config X.yaml [key=value ...]            and what that config asks of it
    doctor --listen [HOST:]PORT                       waits for one of another host, until Ctrl-C
    doctor --reach HOST:PORT [--reach HOST:PORT ...]  the network to those that listen

One line a finding, as soon as it is there; exit code 2 where something is wrong, 0 where nothing is.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from areal_rloo.config import Config, import_entry, load_config
from areal_rloo.errors import ConfigError, UserError, first_line
from areal_rloo.launcher.findings import Finding, findings
from areal_rloo.launcher.findings.base import refused, unsure
from areal_rloo.launcher.findings.link import reach, serve
from areal_rloo.telemetry.progress import stop_printing

_MARGIN = 8


class _Report:
    """Findings on their way to the terminal, and their counts. Written to by one thread or several."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._all: list[Finding] = []
        self._lock = threading.Lock()

    def add(self, finding: Finding) -> None:
        with self._lock:
            self._all.append(finding)
            if not self._as_json:
                _print(f"{finding.state:<{_MARGIN - 1}} {finding.name}: {_line(finding.what)}")
                if finding.fix:
                    _print(f"{'':<{_MARGIN}}fix: {_line(finding.fix)}")

    def end(self) -> int:
        """Print the rest; gives the exit code."""
        counts = Counter(finding.state for finding in self._all)
        if self._as_json:
            rows = [{"name": f.name, "state": f.state, "what": f.what, "fix": f.fix} for f in self._all]
            _print(msgspec.json.encode({"findings": rows, "counts": dict(counts)}).decode())
        else:
            _print(f"{counts['ok']} ok, {counts['wrong']} wrong, {counts['unsure']} unsure")
        return 2 if counts["wrong"] else 0


def main(arguments: Sequence[str]) -> int:
    """Look, say, and give the exit code."""
    options, overrides = _parser().parse_known_args(arguments)
    report = _Report(as_json=options.json)
    try:
        if options.listen is not None:
            _listen(options.listen, report)
        for finding in _look(options, overrides):
            report.add(finding)
    except KeyboardInterrupt:
        return 0 if options.listen is not None else 130
    except UserError as error:
        report.add(refused("arguments", error, fix="see --help"))
    return report.end()


def _listen(place: str, report: _Report) -> None:
    host, port = _host_and_port(place, "--listen")
    try:
        serve(host, port, report.add)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(
            f"--listen {place}: {first_line(error)}; choose an address and a port of this host"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m areal_rloo.launcher.doctor",
        description="Look at this host, and at what a config asks of it. Overrides follow as key.path=value.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="a path, or the name of a shipped config")
    parser.add_argument("--quick", action="store_true", help="only what the launchers look at before they start")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--listen", metavar="[HOST:]PORT", help="wait for --reach of other hosts")
    parser.add_argument("--reach", metavar="HOST:PORT", action="append", default=[], help="a host that listens")
    return parser


def _look(options: argparse.Namespace, overrides: Sequence[str]) -> Iterator[Finding]:
    for argument in overrides:
        if "=" not in argument or options.config is None:
            raise ConfigError(f"argument '{argument}': expected key.path=value, and --config before it")
    places = [_host_and_port(text, "--reach") for text in options.reach]
    config: Config | None = None
    if options.config is not None:
        try:
            config = load_config(options.config, overrides)
            import_entry(config.run.entry)
        except UserError as error:
            yield refused("config", error, fix="correct it")
    if not places or config is not None:
        folder = _folder(config)
        if (folder / "config.yaml").exists():
            yield unsure("run.folder", f"{folder} holds a run already", "go on with it (--resume), or choose another")
        yield from findings(config, folder=folder, thorough=not options.quick)
    for host, port in places:
        yield from reach(host, port)


def _folder(config: Config | None) -> Path:
    named = config.run.folder if config is not None else None
    return Path(named).resolve() if named is not None else Path("runs").resolve()


def _host_and_port(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal()) or int(port) > 65535 or (option == "--reach" and not host):
        raise ConfigError(f"{option} {text}: expected a port from 0 to 65535; write HOST:PORT, or [HOST]:PORT for IPv6")
    return host, int(port)


def _line(text: str) -> str:
    return " ".join(text.split())


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the face of the program


def run() -> int:
    """As a program: whoever closes the pipe early has read enough."""
    try:
        return main(sys.argv[1:])
    except BrokenPipeError:
        stop_printing()
        return 0


if __name__ == "__main__":
    sys.exit(run())
