"""Pages in a real browser, without a network."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
_ALONE = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
_OF_THE_BROWSER = re.compile(r"https?://[^/]*\.(google|googleapis|gvt1|gvt2)\.com/")
_SCRIPTS_MS = 10_000  # of virtual time
# Tells the browser's own view of the page in its title.
_MEASURE = (
    "<script>addEventListener('load', () => setTimeout(() => {"
    "document.title = document.documentElement.scrollWidth + ' of ' + innerWidth}, 1000))</script>"
)
_POLICY = re.compile("<meta http-equiv=.?Content-Security-Policy[^>]*>")  # would refuse a script

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")


@dataclass(frozen=True)
class Opened:
    """A page as the browser shows it."""

    dom: str
    console: list[str]
    asked: list[str]  # addresses


def opened(page: Path, width: int) -> Opened:
    """Open a page in a window of this width, at least 500 pixels, and let its scripts run."""
    log = page.with_suffix(f".{width}.json")
    size, user = f"--window-size={width},1000", f"--user-data-dir={page.parent / 'user'}"
    command = [str(BROWSER), *_ALONE, *_QUIET, user, size, f"--virtual-time-budget={_SCRIPTS_MS}"]
    ended = subprocess.run(
        [*command, f"--log-net-log={log}", page.as_uri()], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    asked = re.findall(r'"url":"(https?://[^"]+)"', log.read_text())
    console = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    return Opened(ended.stdout, console, [url for url in asked if not _OF_THE_BROWSER.match(url)])


def widths(page: Path, width: int) -> tuple[int, int]:
    """Open a page in a window of this width; return the widths of its content and of the window's inside."""
    measured = page.with_name("measured.html")
    measured.write_text(_POLICY.sub("", page.read_text()) + _MEASURE)
    found = re.search(r"<title>(\d+) of (\d+)</title>", opened(measured, width).dom)
    assert found is not None
    return int(found[1]), int(found[2])
