"""The dashboards in a real browser, drawn by Grafana's own panels with what a real Prometheus has of a real run."""

import html
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.browser import needs_browser, opened, widths
from support.drawn_dashboards import NoPanelsError, answers, bundle, page
from support.local_runs import Run
from support.monitoring import dashboards
from support.patience import eventually
from support.prometheus import Prometheus, prometheus

pytestmark = [
    *(pytest.mark.full, needs_browser),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus here: apt install prometheus"),
]
SCROLL_BAR = 20
# Of servers, GPUs, code packages and several samples of a prompt.
OF_OTHER_RUNS = ("Servers: ", "Memory of a GPU", "Share of the time with work on a GPU", "Model FLOPs", "Prompts w")


@pytest.fixture
def watched(start: Callable[..., Run], tmp_path: Path) -> Iterator[Prometheus]:
    """The Prometheus of a run with some train steps and an evaluation."""
    run = start("learner.num_train_steps=100000", "checkpoint.every_n_steps=2", "evaluation.every_n_versions=1")
    with prometheus(tmp_path, tmp_path / "targets") as server:
        run.wait_for(lambda: len(run.records()) >= 6)
        eventually(lambda: server.query("areal_rloo_num_train_steps_total >= 5"), "five train steps in Prometheus")
        yield server


def test_the_dashboards_show_all_panels_of_a_run(watched: Prometheus, tmp_path: Path) -> None:
    try:
        built = bundle()
    except NoPanelsError as error:
        pytest.skip(str(error))
    now_s = time.time()  # noqa: TID251 - Prometheus has the same clock
    times = {"from_s": now_s - 60, "to_s": now_s}
    for name, dashboard in dashboards().items():
        series = answers(dashboard, watched.ask, **times)
        for width in (1360, 500):  # a desktop and a phone
            drawn = tmp_path / f"{name}.html"
            drawn.write_text(page(dashboard, series, built, width=width - SCROLL_BAR, **times))
            shown = opened(drawn, width)
            assert shown.console == shown.asked == []
            parts = shown.dom.split('<div class="panel"')[1:]
            titles = [html.escape(panel["title"], quote=False) for panel in dashboard["panels"]]
            of_panels = dict(zip(titles, parts, strict=True))
            assert [title for title, part in of_panels.items() if title not in part] == []
            empty = [title for title, part in of_panels.items() if not re.search("<canvas|<table", part)]
            assert [title for title in empty if not title.startswith(OF_OTHER_RUNS)] == []
            assert all("No data" in of_panels[title] for title in empty)
            content, window = widths(drawn, width)
            assert content <= window <= width
