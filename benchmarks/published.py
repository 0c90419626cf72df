"""Compare the simulation of `areal_rloo.advice` with figures that other systems published: a minute of calculation.

    python -m benchmarks.published [--output benchmarks/results/published.json]

    staleness  six runs of Qwen3-8B: mean staleness of the first token of a sample
    waits      prime-rl: share of the time that the learner waits
    steps      verl, Qwen2.5-Math-7B on 128 GPUs: seconds for which a step waits for samples, by staleness threshold
    depths     AReaL, RLOO, 1.5B on 8 GPUs: tokens/s by eta, over eta 0
    hours      AReaL, 1.5B and 7B on 128 and 192 GPUs: hours of synchronous over those of asynchronous training

No system published all that a simulation needs. `is_fitted` marks the figures from which the missing numbers were
found. Sources: Applied Compute, "Predicting and controlling staleness"; SemiAnalysis on prime-rl;
verl, docs/advance/fully_async.md; arXiv:2505.24298 (AReaL), Table 8; AReaL, blog/AReaL_v0_3.md, Table 2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from areal_rloo.advice.calibration import drawn_lengths
from areal_rloo.advice.simulation import Setup, Speeds, Step, simulate
from benchmarks import hardware


def staleness() -> list[dict[str, Any]]:
    """Simulate with groups of 8. The setup is slots, samples of a step, queued steps, speeds, and longest over mean.

    The speeds are the throughput of the rollouts over that of the learner, the lengths those of a group.
    """
    runs = (
        ((120, 240, 2, 0.63, 1.42), 1.26),
        ((240, 120, 2, 0.92, 1.43), 3.59),
        ((128, 128, 2, 1.07, 1.44), 3.09),
        ((240, 120, 1, 0.86, 1.42), 3.40),
        ((120, 120, 1, 0.67, 1.42), 1.92),
        ((128, 128, 1, 1.14, 1.45), 2.01),
    )
    rows = []
    for (slots, batch, queue, ratio, longest), measured in runs:
        setup = _setup(
            num_slots=slots,
            groups_per_step=batch // 8,
            max_staleness=20,
            # A full queue stops the rollouts only if they are faster: running, queued, and in training.
            pipeline_depth=slots // batch + queue if ratio > 1 else 20,
            num_train_steps=120,
        )
        lengths = drawn_lengths(mean=1000, std=300, longest_of_group=1000 * longest, group_size=8, most=32_000)
        steps = simulate(_speeds(ratio / slots), setup, lengths)[60:]
        rows.append(
            {
                "case": f"{slots} / {batch} / {ratio:g}",
                "published": measured,
                "formula": round(_formula(slots / batch, queue, ratio, longest), 4),
                "simulated": round(statistics.fmean(step.first_staleness for step in steps), 4),
            }
        )
    return rows


def _formula(slots: float, queue: int, ratio: float, longest: float) -> float:
    """Predict the staleness by the published formula; `slots` in steps."""
    if ratio < 1:
        return slots * longest + ratio
    return slots * longest / ratio + (2 * queue + ratio - 1) / (2 * ratio)


def waits() -> list[dict[str, Any]]:
    """Simulate 1.95 generated and 2.75 trained samples a second."""
    slots, lengths = 64, drawn_lengths(mean=1000, std=300, longest_of_group=1420, group_size=8, most=32_000)
    setup = _setup(num_slots=slots, groups_per_step=8, max_staleness=20, pipeline_depth=20, num_train_steps=80)
    steps = simulate(_speeds(1.95 / 2.75 / slots), setup, lengths)
    seconds = steps[-1].ended_s - steps[19].ended_s
    return [_row("1.95 of 2.75 samples/s", 0.30, sum(step.wait_s for step in steps[20:]) / seconds)]


_SAMPLES, _LONGEST = 16, 28 * 1024  # of a group, and tokens
_PROMPTS = 80  # of a step, with 10 engines; as 512 with 64, so an engine has the same load
_PARTS = 10  # train steps of ours for one of verl's, as thresholds of 0.1, 0.3 and 0.5 need
_OTHER_S = 4.1  # of a step of verl, beside the wait and the update
_SYNC_DECODE_S = 177.85
_UPDATES_S = {0.0: 98.77, 0.1: 109.12, 0.3: 103.22, 0.5: 113.16}  # by threshold


class Decoding(NamedTuple):
    """The lengths, and the seconds of a decode step, as fixed + each * completions."""

    lengths: npt.NDArray[np.float64]
    fixed_s: float
    each_s: float


def steps() -> tuple[list[dict[str, Any]], Decoding]:
    """Find mean length and decode speed from the synchronous generation and thresholds 0 and 0.1.

    A threshold s lets the rollouts begin (1 + s) batches from one version of the weights to the next. The time of the
    updates is that of the published run.
    """
    published = {0.0: 128.47, 0.1: 58.17, 0.3: 38.88, 0.5: 33.14}
    fitted = (0.0, 0.1)

    def error(decoding: Decoding) -> float:
        return sum((_verl_wait_s(decoding, share) / published[share] - 1) ** 2 for share in fitted)

    means, slopes = range(1000, 8001, 500), np.arange(0.0, 4.1, 0.25)  # slopes: of 64 completions, over the fixed part
    found = min((_synchronous(mean, float(slope)) for mean, slope in itertools.product(means, slopes)), key=error)
    return [
        _row(f"threshold {share:g}", measured, _verl_wait_s(found, share), is_fitted=share in fitted)
        for share, measured in published.items()
    ], found


def _synchronous(mean: float, slope: float) -> Decoding:
    """Choose the speed at which 20 engines, as 128 GPUs, decode a batch in the published time."""
    lengths = drawn_lengths(mean=mean, std=mean, longest_of_group=2.5 * mean, group_size=_SAMPLES, most=_LONGEST)
    setup = _setup(num_workers=20, groups_per_step=_PROMPTS, num_train_steps=4)
    ended = simulate(
        Speeds(decode_fixed_s=1.0, decode_each_s=slope / 64, train_fixed_s=1.0, train_token_s=0.0), setup, lengths
    )
    fixed_s = _SYNC_DECODE_S / statistics.fmean(step.wait_s for step in ended)
    return Decoding(lengths, fixed_s, fixed_s * slope / 64)


def _verl_wait_s(decoding: Decoding, threshold: float) -> float:
    """Return the seconds for which a step waits, with 10 engines, as 64 GPUs."""
    speeds = Speeds(
        decode_fixed_s=decoding.fixed_s,
        decode_each_s=decoding.each_s,
        train_fixed_s=(_UPDATES_S[threshold] + _OTHER_S) / _PARTS,
        train_token_s=0.0,
    )
    ahead = round(_PARTS * (1 + threshold)) - 1
    setup = _setup(
        num_workers=10,
        groups_per_step=_PROMPTS // _PARTS,
        max_staleness=ahead,
        pipeline_depth=ahead,
        num_train_steps=8 * _PARTS,
        publish_every=_PARTS,
    )
    ended = simulate(speeds, setup, decoding.lengths)
    return _PARTS * statistics.fmean(step.wait_s for step in ended[4 * _PARTS :])


def depths() -> list[dict[str, Any]]:
    """Find the speed of the rollouts over that of the learner from eta 1. A step has 8 samples for each slot."""
    published = {1: 47.8 / 27.1, 4: 49.0 / 27.1, 16: 52.0 / 27.1}
    lengths = drawn_lengths(mean=1000, std=1000, longest_of_group=2500, group_size=_SAMPLES, most=_LONGEST)

    def speedup(ratio: float, eta: int) -> float:
        """Return the throughput over that of eta 0; `ratio`: of the rollouts over the learner."""
        step_s = []
        for depth in (0, eta):
            setup = _setup(
                num_workers=4,
                num_slots=32,
                groups_per_step=64,
                max_staleness=depth,
                pipeline_depth=max(1, depth),
                num_train_steps=40,
                lease_ahead=None,
            )
            speeds = Speeds(
                decode_fixed_s=0.5, decode_each_s=0.5 / 32, train_fixed_s=0.0, train_token_s=ratio / (4 * 32)
            )
            step_s.append(_mean_step_s(simulate(speeds, setup, lengths), 20))
        return step_s[0] / step_s[1]

    ratio = min(np.arange(0.3, 1.0, 0.05).tolist(), key=lambda ratio: abs(speedup(ratio, 1) / published[1] - 1))
    return [
        _row(f"eta {eta} over 0", measured, speedup(ratio, eta), is_fitted=eta == 1)
        for eta, measured in published.items()
    ]


def hours() -> list[dict[str, Any]]:
    """Find the mean length from the smaller model; the other has the same, and more GPUs for the same samples.

    A quarter of the GPUs trains, as fast as the others generate; synchronous, all of them do both in turn. A step has
    512 prompts; 32 engines of the simulation, with 256 slots each, stand for all GPUs.
    """
    published = {128: 41.0 / 14.8, 192: 57.7 / 25.4}
    mean = min(range(8000, 14_001, 500), key=lambda mean: abs(_speedup(mean, 128) / published[128] - 1))
    return [
        _row(f"{num_gpus} GPUs", measured, _speedup(mean, num_gpus), is_fitted=num_gpus == 128)
        for num_gpus, measured in published.items()
    ]


def _speedup(mean: float, num_gpus: int) -> float:
    """Return the throughput with eta 8 over that with eta 0; half of a decode step of 64 completions is fixed."""
    lengths = drawn_lengths(mean=mean, std=0.8 * mean, longest_of_group=2.2 * mean, group_size=_SAMPLES, most=_LONGEST)
    prompts = 32 * 512 // num_gpus

    def step_s(num_workers: int, train_s: float, eta: int) -> float:
        setup = _setup(
            num_workers=num_workers,
            groups_per_step=prompts,
            max_staleness=eta,
            pipeline_depth=max(1, eta),
            num_train_steps=24 if eta else 4,
        )
        speeds = Speeds(decode_fixed_s=1.0, decode_each_s=1 / 64, train_fixed_s=train_s, train_token_s=0.0)
        return _mean_step_s(simulate(speeds, setup, lengths), 12 if eta else 1)

    generation_s = step_s(24, 0.0, 8)
    return step_s(32, generation_s / 4, 0) / step_s(24, generation_s, 8)


def _mean_step_s(ended: list[Step], first: int) -> float:
    """Return the mean seconds of the steps from this one on."""
    return (ended[-1].ended_s - ended[first - 1].ended_s) / (len(ended) - first)


def _speeds(train_token_s: float) -> Speeds:
    """A decode step takes a second, whatever the batch."""
    return Speeds(decode_fixed_s=1.0, decode_each_s=0.0, train_fixed_s=0.0, train_token_s=train_token_s)


def _setup(**changes: Any) -> Setup:
    usual = {"num_workers": 1, "num_slots": 256, "num_ranks": 1, "max_staleness": 0, "pipeline_depth": 1}
    return Setup(**(usual | {"lease_ahead": 0} | changes))


def _row(case: str, published: float, simulated: float, *, is_fitted: bool = False) -> dict[str, Any]:
    return {"case": case, "published": round(published, 4), "simulated": round(simulated, 4), "is_fitted": is_fitted}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    arguments = parser.parse_args()
    of_verl, decoding = steps()
    result = {
        "staleness": staleness(),
        "waits": waits(),
        "steps": of_verl,
        "decoding": {
            "tokens_mean": round(float(decoding.lengths.mean())),
            "fixed_ms": round(1000 * decoding.fixed_s, 2),
            "each_ms": round(1000 * decoding.each_s, 4),
        },
        "depths": depths(),
        "hours": hours(),
    }
    print(json.dumps(result, indent=2))
    hardware.write(arguments.output, result)


if __name__ == "__main__":
    main()
