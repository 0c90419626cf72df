"""GPU check: real runs of the launcher with learner and engine on the same GPU.

    python -m benchmarks.gpu_run [--device cpu --small]

The embedded engine and models with random weights: the quickstart's, and the 1.5B shape, whose samples are all as long
as allowed. Learner and engine are side by side or in turns. Each run must end with exit code 0 and a summary, and lose
no sample. A CPU has nothing to share side by side: there learner and worker have cores of their own.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from areal_rloo.models.tiny import make_tiny_tokenizer
from benchmarks.gpu_part import REPO, Part, run
from benchmarks.shapes import SHAPES, save_random

_LIMIT_S = 240
_GAPS = {"float32": 1e-3, "bfloat16": 2e-2}  # nats between the engine's and the learner's logprobs, mean


class Case(NamedTuple):
    shape: str  # tiny, or a name of SHAPES
    dtype: str
    share: str
    options: tuple[str, ...]


_TINY = (
    *("learner.num_train_steps=8", "rollout.num_slots=256"),
    *("evaluation.every_n_versions=2", "checkpoint.every_n_steps=4"),
)
_LARGE = (
    *("learner.num_train_steps=5", "learner.groups_per_step=32", "learner.microbatch_tokens=auto"),
    *("learner.gradient_checkpointing=auto", "data.max_prompt_tokens=64", "rollout.sampling.max_new_tokens=512"),
    *("rollout.num_slots=256", "evaluation.every_n_versions=100", "data.eval.num_prompts=8"),
)
_SMALL = (
    *("learner.num_train_steps=3", "learner.groups_per_step=4", "rollout.sampling.max_new_tokens=16"),
    *("evaluation.every_n_versions=2", "data.eval.num_prompts=8"),
)
CASES = (
    Case("1.5b", "bfloat16", "side_by_side", _LARGE),
    Case("1.5b", "bfloat16", "in_turns", _LARGE),
    Case("tiny", "bfloat16", "side_by_side", _TINY),
    Case("tiny", "float32", "side_by_side", _TINY),
)
SMALL_CASES = (
    Case("tiny", "float32", "never", _SMALL),
    Case("small", "bfloat16", "in_turns", _SMALL),
)


def check(part: Part) -> None:
    for number, case in enumerate(CASES if part.on_gpu else SMALL_CASES):
        folder = part.folder / f"run_{number}"
        seconds = _run(part, folder, case)
        if (folder / "summary.json").exists():
            summary = json.loads((folder / "summary.json").read_text())
            _judge(part, case, seconds, summary, _records(folder))
        shutil.rmtree(folder, ignore_errors=True)  # a refused run has none
    if not part.on_gpu:
        part.notes.append("A CPU has nothing to share side by side: that run used rollout.share_devices=never.")


def _run(part: Part, folder: Path, case: Case) -> float:
    device = part.device.type
    options = [
        *(f"run.folder={folder}", f"rollout.share_devices={case.share}", f"model.dtype={case.dtype}"),
        *(f"learner.device={device}", f"rollout.device={device}", "learner.num_ranks=1", "rollout.num_workers=1"),
        *("rollout.engine=embedded", *case.options),
        "algorithm.loss.entropy_coefficient=1e-8",  # all rewards are 0: without it, no sample has a gradient
        f"model.path={_model(part, case.shape)}" if case.shape in SHAPES else "model.tiny.warm_start=null",
    ]
    command = [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}
    print(f"--- run: {' '.join(options)}", flush=True)
    started = time.perf_counter()
    ended = subprocess.run(command, cwd=REPO, env=environment, timeout=_LIMIT_S, check=False)
    part.check(ended.returncode == 0, f"{_named(case)}: the run ended with exit code {ended.returncode}")
    if ended.returncode:
        for log in sorted((folder / "logs").glob("*")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
    return time.perf_counter() - started


def _model(part: Part, shape: str) -> Path:
    folder = save_random(part.folder / shape, SHAPES[shape])
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def _named(case: Case) -> str:
    return f"{case.shape}, {case.dtype}, {case.share}"


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def _judge(part: Part, case: Case, seconds: float, summary: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    gaps = [step["mismatch_abs_mean"] for step in steps if isinstance(step["mismatch_abs_mean"], float)]
    gap = max((gap for gap in gaps if math.isfinite(gap)), default=math.nan)
    ledger = summary["ledger"]
    waiting = ledger["buffered"] + ledger["in_flight"]
    lost = ledger["admitted"] - ledger["trained"] - sum(ledger["dropped"].values()) - waiting
    first, last = steps[0], steps[-1]
    spent_s = last["wall_s"] - first["wall_s"]  # the first step also waits for the engine's start
    idle_s, busy_s = (last[key] - first[key] for key in ("rollout_idle_s", "rollout_busy_s"))
    part.row(
        "runs",
        model=case.shape,
        dtype=case.dtype,
        share_devices=case.share,
        train_steps=len(steps),
        samples_trained=ledger["trained"],
        samples_lost=lost,
        largest_mean_mismatch=float(f"{gap:.3g}"),
        tokens_per_s=round((last["generated_tokens"] - first["generated_tokens"]) / spent_s),
        learner_tokens_per_s=round(last["learner_tokens_per_s"]),
        learner_idle_share=round((last["learner_idle_s"] - first["learner_idle_s"]) / spent_s, 2),
        rollout_idle_share=round(idle_s / max(1e-9, idle_s + busy_s), 2),
        seconds=round(seconds, 1),
    )
    print(f"--- times of the last step: {json.dumps(last['times_s'])}", flush=True)
    part.check(lost == 0, f"{_named(case)}: {lost} samples are lost")
    limit = _GAPS[case.dtype]
    part.check(gap < limit, f"{_named(case)}: mismatch of engine and learner {gap}, limit {limit}")


if __name__ == "__main__":
    run(check)
