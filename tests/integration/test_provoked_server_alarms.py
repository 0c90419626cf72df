"""The alarms about servers fire in a real run with a real SGLang, whose calls a proxy disturbs.

The minutes of the rules are seconds.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.external_server import export, running_server
from support.faulty_server import Faults, faulty_proxy
from support.local_runs import Run
from support.prometheus import Prometheus, assert_a_silent_end, prometheus, sooner
from support.server_support import SERVERS

pytestmark = [
    *(pytest.mark.full, pytest.mark.rare),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed here"),
]


def test_each_trouble_of_a_server_fires_its_alarm(start: Callable[..., Run], wide_folder: Path, tmp_path: Path) -> None:
    model, reward = tmp_path / "model", tmp_path / "noise.py"
    export(wide_folder, model)
    reward.write_text("def noise(completion_ids):\n    return float(sum(completion_ids) % 2)\n")

    async def disturb(url: str, api_key: str) -> None:
        async with faulty_proxy(url, api_key) as (faced, faults):
            run = start(
                *("rollout.engine=sglang", f"rollout.sglang.urls=[{faced}]", f"model.path={model}"),
                *("weights.transport=shared_memory", "weights.timeout_s=5", "rollout.num_slots=8"),
                "learner.num_train_steps=100000",
                *("evaluation.every_n_versions=0", "data.eval=null"),
                *(f"data.train.rewards=[{{function: {reward}:noise}}]", "learner.optimizer.learning_rate=0.01"),
            )
            with prometheus(tmp_path, tmp_path / "targets", rules=sooner) as server:
                await asyncio.to_thread(_assert_each_trouble_fires, run, server, faults)

    with running_server(SERVERS["sglang"], model, tmp_path / "server.log") as process:
        asyncio.run(disturb(process.url, process.api_key))


def _assert_each_trouble_fires(run: Run, server: Prometheus, faults: Faults) -> None:
    def fires(name: str) -> None:
        run.wait_for(lambda: name in server.alarms())

    run.wait_for(lambda: len(run.records()) >= 2)
    assert not {name for name in server.alarms() if name.startswith("EngineServer")}
    _next(faults, "/update_weights_from_disk", "ignore", 1)
    fires("EngineServerWeights")
    for number in (1, 2, 3):
        _next(faults, "/update_weights_from_disk", "reset", 1)
        is_back = f"areal_rloo_engine_server_restarts_total == {number}"
        run.wait_for(lambda is_back=is_back: bool(server.query(is_back)))  # type: ignore[misc]
    fires("EngineServerRestarts")
    assert "EngineServerUnproven" not in server.alarms()
    _next(faults, "/update_weights_from_disk", "hang", 1)
    run.wait_for(lambda: faults.left == 0)
    _next(faults, "/weights_checker", "refuse", 10**6)  # the server that is found again gives no digests
    fires("EngineServerUnproven")
    _next(faults, "/update_weights_from_disk", "reset", 1)
    ends = {"EngineServerWeights", "EngineServerRestarts", "EngineServerUnproven"}
    run.wait_for(lambda: not ends & server.alarms())
    assert_a_silent_end(server, run)


def _next(faults: Faults, path: str, fault: str, num: int) -> None:
    faults.path, faults.fault, faults.left = path, fault, num  # type: ignore[assignment]
