"""The table of the baselines: whole comparisons alone, and puzzles that a run can load."""

import json
from pathlib import Path
from typing import Any

import pytest

from areal_rloo.config import load_config
from areal_rloo.tasks import load_eval, load_train
from benchmarks import baselines
from benchmarks.learning import Job, Outcome


def _record(run: str, seed: int, staleness: int, *accuracies: float) -> dict[str, Any]:
    return {"run": run, "seed": seed, "staleness": staleness, "accuracies": accuracies, "core_s": 10.0 + seed}


def test_a_row_has_a_run_of_each_seed() -> None:
    records = [_record("chain_sum/rloo", seed, 8, 0.5, 0.6, 0.1 * seed, 0.2 + 0.1 * seed) for seed in range(3)]
    records += [_record("chain_sum/grpo", seed, 8, 0.5, 0.6) for seed in (0, 2)]
    (row,) = baselines.table_of(records)
    assert (row["task"], row["preset"], row["staleness"], row["start"]) == ("chain_sum", "rloo", 8, 0.5)
    assert row["final_mean"] == pytest.approx(0.2)
    assert row["final_interval"] == pytest.approx(4.303 * 0.1 / 3**0.5, abs=1e-3)
    assert row["core_s"] == 11.0


def test_runs_that_have_a_record_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = tmp_path / "baselines.jsonl"
    records.write_text(json.dumps(_record("a/rloo", 0, 0, 0.5)) + "\n")
    jobs = [Job("a/rloo", (), 0, 0), Job("a/rloo", (), 0, 8), Job("a/rloo", (), 1, 0)]
    monkeypatch.setattr(baselines, "_timed", _timed)
    baselines.run_missing(jobs, records, minutes=10)
    found = [json.loads(line) for line in records.read_text().splitlines()]
    assert {(one["seed"], one["staleness"]) for one in found} == {(0, 0), (0, 8), (1, 0)}
    assert len(found) == 3
    baselines.run_missing([Job("b/rloo", (), 0, 0)], records, minutes=0)
    assert len(records.read_text().splitlines()) == 3, "the time is over"


def _timed(job: Job) -> tuple[Outcome, float]:
    return Outcome(job, (0.5, 0.75), 0.0, 1.0), 1.0


@pytest.mark.parametrize("name", [name for name, puzzle in baselines.PUZZLES.items() if puzzle is not None])
def test_the_prompts_of_a_puzzle_fit(name: str) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning_gym is not installed here")
    puzzle = baselines.PUZZLES[name]
    assert puzzle is not None
    config = load_config("quickstart.yaml", puzzle.overrides())
    for items in (load_train(config.data, seed=0)[0].items, load_eval(config.data, seed=0)[0].items):
        chosen = [items[index] for index in range(0, len(items), 97)]
        assert max(len(item.text.encode()) for item in chosen) <= puzzle.max_prompt_tokens
        assert max(len(f"<answer>{item.answer}</answer>") for item in chosen) < puzzle.max_new_tokens
