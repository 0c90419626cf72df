"""GPU check: a real run of the launcher with learner and engine on the same GPU.

    python benchmarks/gpu_run.py [--device cpu --small]

The quickstart's model with random weights and the embedded engine, in float32 and in bfloat16. Each run must end with
exit code 0 and a summary, and lose no sample. A CPU has nothing to share: there the same runs use the CPU.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_part import REPO, Part, run

_LIMIT_S = 240
_GAPS = {"float32": 1e-3, "bfloat16": 2e-2}  # nats between the engine's and the learner's logprobs, mean


def check(part: Part) -> None:
    for dtype in ("float32", "bfloat16") if part.on_gpu else ("float32",):
        folder = part.folder / dtype
        seconds = _run(part, folder, dtype, num_steps=3 if part.small else 20)
        summary = json.loads((folder / "summary.json").read_text())
        _judge(part, dtype, seconds, summary, _records(folder))
    if not part.on_gpu:
        part.notes.append("A CPU has nothing to share: the run used rollout.share_devices=false.")


def _run(part: Part, folder: Path, dtype: str, num_steps: int) -> float:
    device = part.device.type
    options = [
        f"run.folder={folder}",
        f"rollout.share_devices={str(part.on_gpu).lower()}",
        *(f"learner.device={device}", f"rollout.device={device}", "learner.num_ranks=1", "rollout.num_workers=1"),
        *(f"model.dtype={dtype}", "model.tiny.warm_start=null", "rollout.engine=embedded"),
        *(f"learner.num_train_steps={num_steps}", "evaluation.every_n_versions=2", "checkpoint.every_n_steps=10"),
    ]
    if part.small:
        options += ["learner.groups_per_step=4", "rollout.sampling.max_new_tokens=16", "data.eval.num_prompts=8"]
    command = [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}
    started = time.perf_counter()
    ended = subprocess.run(command, cwd=REPO, env=environment, timeout=_LIMIT_S, check=False)
    part.check(ended.returncode == 0, f"{dtype}: the run ended with exit code {ended.returncode}")
    if ended.returncode:
        for log in sorted((folder / "logs").glob("*")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
    return time.perf_counter() - started


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "learner_tokens_per_s" in record]


def _judge(part: Part, dtype: str, seconds: float, summary: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    gaps = [step["mismatch_abs_mean"] for step in steps if isinstance(step["mismatch_abs_mean"], float)]
    gap = max((gap for gap in gaps if math.isfinite(gap)), default=math.nan)
    ledger = summary["ledger"]
    waiting = ledger["buffered"] + ledger["in_flight"]
    lost = ledger["admitted"] - ledger["trained"] - sum(ledger["dropped"].values()) - waiting
    part.row(
        "runs",
        dtype=dtype,
        train_steps=len(steps),
        samples_trained=ledger["trained"],
        samples_lost=lost,
        largest_mean_mismatch=float(f"{gap:.3g}"),
        learner_tokens_per_s=round(steps[-1]["learner_tokens_per_s"]),
        seconds=round(seconds, 1),
    )
    part.check(lost == 0, f"{dtype}: {lost} samples are lost")
    part.check(gap < _GAPS[dtype], f"{dtype}: mismatch of engine and learner {gap}, limit {_GAPS[dtype]}")


if __name__ == "__main__":
    run(check)
