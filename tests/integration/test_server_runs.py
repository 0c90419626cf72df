"""A whole run on GSM8K with a managed SGLang server."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_runs import Run, balanced
from support.server_support import server_processes, sglang_python

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


def test_gsm8k_trains_on_a_managed_server(
    start: Callable[..., Run], gsm8k_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server spawns its processes, as the server of a user does."""
    monkeypatch.delenv("AREAL_RLOO_SGLANG_FORKS")
    run = start(
        *("rollout.engine=sglang", f"rollout.sglang.python={sglang_python()}", "rollout.num_workers=1"),
        *(f"data.train.path={gsm8k_folder / 'train.jsonl'}", "data.max_prompt_tokens=1600"),
        *("model.path=tiny", "model.dtype=float32", "rollout.num_slots=8", "learner.optimizer.learning_rate=0.01"),
        *("learner.num_train_steps=4", "learner.microbatch_tokens=4096", "learner.num_minibatches=1"),
        config="gsm8k_rloo.yaml",
    )
    code, output = run.wait()
    assert code == 0, output
    ledger = run.summary()["ledger"]
    assert run.summary()["num_train_steps"] == 4
    assert balanced(ledger)
    assert ledger["dropped"].keys() <= {"stale"}, "a slow machine; the prompts come again"
    assert ledger["trained"] == 4 * 4 * 4
    assert server_processes(run.folder / "logs" / "rollout-0.sglang.log") == []
