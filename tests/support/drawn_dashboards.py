"""Draws the shipped dashboards with Grafana's own panels, from npm, and with the answers of a real Prometheus.

    python tests/support/drawn_dashboards.py 9090 FOLDER --minutes 5 [--width 1360]

Writes a page for each dashboard, which needs no server and no network.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.monitoring import dashboards, with_values
from support.prometheus import Prometheus

SOURCE = Path(__file__).resolve().parents[1] / "grafana"
BUILT = Path(__file__).resolve().parents[2] / "build" / "grafana"
_FILES = ("package.json", "dashboard.jsx")
_BUNDLE = ("--bundle", "--format=iife", "--minify", "--jsx=automatic", "--loader:.svg=text", "--loader:.ttf=empty")
_NUM_POINTS = 240
_LABEL = re.compile(r"\{\{(\w+)\}\}")
Ask = Callable[..., Any]
"""Returns the data of an answer of Prometheus: the path in its HTTP API, and parameters."""


class NoPanelsError(Exception):
    """npm cannot install Grafana's panels here."""


def bundle() -> tuple[str, str]:
    """Build the panels; return the script and the style of a page.

    Raises:
        NoPanelsError: npm is missing, or cannot install them.
    """
    if shutil.which("npm") is None:
        raise NoPanelsError("no npm here: install Node.js 20 or newer")
    BUILT.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copy(SOURCE / name, BUILT)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--legacy-peer-deps"]
    installed = subprocess.run(install, cwd=BUILT, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        raise NoPanelsError(f"npm cannot install Grafana's panels: {installed.stderr.strip()[-300:]}")
    esbuild = [str(BUILT / "node_modules" / ".bin" / "esbuild"), "dashboard.jsx", "--outfile=page.js", *_BUNDLE]
    esbuild.append('--define:process.env.NODE_ENV="production"')
    subprocess.run(esbuild, cwd=BUILT, capture_output=True, check=True)
    return (BUILT / "page.js").read_text(), (BUILT / "page.css").read_text()


def answers(dashboard: dict[str, Any], ask: Ask, *, from_s: float, to_s: float) -> dict[int, list[dict[str, Any]]]:
    """Return the series of each panel, by the panel's id."""
    asked = {"start": from_s, "end": to_s, "step": _step_s(from_s=from_s, to_s=to_s)}
    found: dict[int, list[dict[str, Any]]] = {}
    for panel in dashboard["panels"]:
        found[panel["id"]] = []
        for target in panel["targets"]:
            series = ask("query_range", query=with_values(target["expr"]), **asked)["result"]
            legend = target["legendFormat"]
            found[panel["id"]] += [each | {"legend": _legend(legend, each["metric"])} for each in series]
    return found


def page(
    dashboard: dict[str, Any], series: dict[int, list[dict[str, Any]]], built: tuple[str, str], **place: float
) -> str:
    """Return the HTML of a dashboard. `place`: the times from_s and to_s, and the width in pixels."""
    script, style = built
    span = {"from": 1000 * place["from_s"], "to": 1000 * place["to_s"]}
    step_s = _step_s(from_s=place["from_s"], to_s=place["to_s"])
    data = {"dashboard": dashboard, "answers": series, "range": span, "step_s": step_s, "width": place["width"]}
    return (
        f"<!doctype html><meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>"
        f"{dashboard['title']}</title><style>{style}</style><body style='margin: 0'><div id='root'></div>"
        f"<script>window.DATA = {_in_script(json.dumps(data))}</script><script>{_in_script(script)}</script>"
    )


def _step_s(*, from_s: float, to_s: float) -> float:
    return max(1.0, (to_s - from_s) / _NUM_POINTS)


def _legend(template: str, labels: dict[str, str]) -> str:
    return _LABEL.sub(lambda match: labels.get(match[1], ""), template) or json.dumps(labels)


def _in_script(text: str) -> str:
    return text.replace("</script", "<\\/script")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int, help="of a Prometheus on this machine")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--until", type=float, default=time.time(), help="seconds since 1970")  # noqa: TID251
    parser.add_argument("--width", type=int, default=1360)
    options = parser.parse_args(arguments)
    ask = Prometheus(options.port).ask
    built, times = bundle(), {"from_s": options.until - 60 * options.minutes, "to_s": options.until}
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, dashboard in dashboards().items():
        drawn = page(dashboard, answers(dashboard, ask, **times), built, width=options.width, **times)
        (options.folder / f"{name}.html").write_text(drawn)


if __name__ == "__main__":
    main(sys.argv[1:])
