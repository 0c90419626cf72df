"""A run that never ends a step: the scrape of its learner says what happens all the same."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.local_runs import Run
from support.patience import eventually

pytestmark = pytest.mark.slow

MOVING = ("generated_tokens", "ledger_admitted", "learner_idle_seconds", "wall_seconds", "epoch")


def _scraped(run: Run) -> dict[tuple[str, str], float]:
    """Give the learner's numbers by name and label."""
    (target,) = (run.folder.parent / "targets").glob("*.learner.json")
    (address,) = json.loads(target.read_text())[0]["targets"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    names = (sample.name.removeprefix("areal_rloo_").removesuffix("_total") for sample in samples)
    return {(name, sample.labels.get("reason", "")): sample.value for name, sample in zip(names, samples, strict=True)}


def test_a_scrape_moves_although_all_groups_are_dropped(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text("def flat(completion):\n    return 1.0\n")
    run = start(
        f"data.train.rewards=[{{function: {tmp_path / 'flat.py'}:flat}}]",
        *("algorithm.min_reward_std=0.01", "algorithm.max_filtered_batches=0", "launcher.drain_timeout_s=20"),
        *("evaluation.every_n_versions=0", "data.eval=null"),
    )
    dropped = ("ledger_dropped", "low_reward_std")
    run.wait_for(lambda: bool(list((run.folder.parent / "targets").glob("*.learner.json"))))
    eventually(lambda: _scraped(run).get(dropped, 0) > 0, "the first dropped group")
    before = _scraped(run)
    eventually(lambda: _scraped(run)[dropped] > before[dropped], "further drops")
    for name in MOVING:
        eventually(lambda n=name: _scraped(run)[n, ""] > before[n, ""], name)  # type: ignore[misc]
    assert _scraped(run)["num_workers", ""] == 1
    assert run.records() == []
    run.process.terminate()
    code, output = run.wait()
    assert code == 0, output
