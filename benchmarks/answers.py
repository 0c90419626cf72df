"""Measure which share of the intake's time per sample goes into holding answers against their leases.

    python benchmarks/answers.py [--output benchmarks/results/answers.json]

A real intake grants leases to a worker, and gets the answers as frames, a group per message, in a single process and
without sockets. The intake's time is decoding with every check of the codec, ledger, buffer and encoded replies, but no
grants of new leases. The checks are those of `intake/lies.py`, on the same messages, timed alone. Results are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import hardware
import numpy as np

from areal_rloo.config import load_config
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Grant, Ledger
from areal_rloo.intake.prompts import Prompt, PromptStream
from areal_rloo.tasks import Item, Source
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.weights.offers import Offers
from areal_rloo.wire.codec import decode_worker, encode
from areal_rloo.wire.columns import Frame, Limits
from areal_rloo.wire.messages import Finished, Hello, Lease, Leases, Results, Work

LIMITS = Limits()
VOCAB_SIZE = 151_936
PROMPT = tuple(range(100, 228))
GROUP_SIZE, NUM_GROUPS = 8, 256
NUM_SAMPLES = GROUP_SIZE * NUM_GROUPS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    result: dict[str, object] = {}
    for num_tokens in (128, 1024, 8192):
        measured = [_measure(num_tokens) for _ in range(arguments.repeats)]
        whole, checks = (statistics.median(values) for values in zip(*measured, strict=True))
        result[f"{num_tokens}_tokens"] = {
            "intake_us_per_sample": round(1e6 * whole, 2),
            "checks_us_per_sample": round(1e6 * checks, 2),
            "share": round(checks / whole, 4),
        }
        print(f"{num_tokens} tokens: {result[f'{num_tokens}_tokens']}", flush=True)
    hardware.write(arguments.output, result)


def _measure(num_tokens: int) -> tuple[float, float]:
    """Return the intake's seconds per sample, and those of the checks among them."""
    intake = _intake(num_tokens)
    sent = intake.handle("worker", Hello("w", "1", NUM_SAMPLES, 0, None, 1, 0, (), Work()), 0.0)
    messages = [_answer(lease, number, num_tokens) for number, lease in enumerate(_leases(sent))]
    assert len(messages) == NUM_GROUPS
    started_s = time.perf_counter()
    for message in messages:
        for outgoing in intake.handle("worker", decode_worker(message, LIMITS), 0.0):
            encode(outgoing.message)
    whole_s = time.perf_counter() - started_s
    assert intake.statistics().ledger.buffered == NUM_SAMPLES, "all answers are taken"
    return whole_s / NUM_SAMPLES, _checks_s(intake, messages) / NUM_SAMPLES


def _checks_s(intake: Intake, messages: list[list[Frame]]) -> float:
    """Return the seconds of the checks alone, on trajectories that were just decoded."""
    lies, prompt, grant = intake.lies, Prompt(0, 0, PROMPT, Item("?", "1")), Grant(1, "w", 0)
    total_s = 0.0
    for message in messages:
        results = decode_worker(message, LIMITS)
        assert isinstance(results, Results)
        started_s = time.perf_counter()
        lowest = lies.lowest_plain_version(results, 0)
        found = [lies.in_trajectories(each.trajectories, grant, prompt, 0, lowest) for each in results.finished]
        total_s += time.perf_counter() - started_s
        assert not any(found), "these answers are no lies"
    return total_s


def _intake(num_tokens: int) -> Intake:
    overrides = (
        f"algorithm.group_size={GROUP_SIZE}",
        f"learner.groups_per_step={NUM_GROUPS}",
        f"learner.microbatch_tokens={2 * (num_tokens + len(PROMPT))}",
        f"rollout.sampling.max_new_tokens={num_tokens}",
        f"data.max_prompt_tokens={len(PROMPT)}",
        "algorithm.max_staleness=0",
    )
    return Intake(
        load_config("quickstart.yaml", overrides),
        ledger=Ledger(),
        stream=PromptStream([Source("all", [Item("?", "1")])], lambda _: PROMPT, seed=0, num_epochs=None),
        evaluation=Evaluation([], lambda _: None),
        offers=Offers(together=False, timeout_s=300.0, call_timeout_s=2.0),
        policy_version=0,
        history=(("learner", 0),),
        vocab_size=VOCAB_SIZE,
    )


def _leases(sent: list[Outgoing]) -> list[Lease]:
    return [lease for _, message in sent if isinstance(message, Leases) for lease in message.leases]


def _answer(lease: Lease, number: int, num_tokens: int) -> list[Frame]:
    """Return the frames of a message with the answers to a lease."""
    rng = np.random.default_rng(number)
    prompt = np.array(PROMPT, np.int32)
    finished = []
    for duty in lease.duties:
        completion = Completion(
            rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32),
            -rng.random(num_tokens, dtype=np.float32),
            np.zeros(num_tokens, np.int32),
            "stop",
        )
        finished.append(Finished(duty.lease_id, (Trajectory(*duty.sample_id, prompt, completion, 1.0),)))
    return [bytes(frame) for frame in encode(Results("learner", number, tuple(finished)))]


if __name__ == "__main__":
    main()
