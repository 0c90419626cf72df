"""Measure which share of the intake's time per sample goes into holding answers against their leases.

    python -m benchmarks.answers [--output benchmarks/results/answers.json]

A real intake grants leases to a worker in another process. The answers come over a socket file, a group per message,
two at a time without acknowledgement, as full messages of a real worker.
The intake's time is that of its thread: sockets, decoding with every check of the codec, ledger, buffer, a new lease
for each answer, and replies; but no tokenizer. In every other intake, the check of each message in `intake/lies.py` is
timed where it happens, with caches as warm as they are there. (The difference between intakes with and without checks
is smaller than its noise.)
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np

from areal_rloo.config import load_config
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies
from areal_rloo.intake.prompts import Prompt, PromptStream
from areal_rloo.rollout.protocol import RESULTS_IN_FLIGHT
from areal_rloo.tasks import Item, Source
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.weights.offers import Offers
from areal_rloo.wire.address import Address, SocketFile
from areal_rloo.wire.channels import LearnerChannel, WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Ack, Drain, Finished, Hello, Lease, Leases, Results, Work
from benchmarks import hardware

LIMITS = Limits()
VOCAB_SIZE = 151_936
PROMPT = tuple(range(100, 228))
GROUP_SIZE, NUM_GROUPS = 8, 256
NUM_SAMPLES = GROUP_SIZE * NUM_GROUPS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    result: dict[str, object] = {}
    for num_tokens in (128, 1024, 8192):
        whole_s, checks_s = [], []
        for _ in range(arguments.repeats):
            whole_s.append(_measure(num_tokens, Lies))
            _Timed.seconds.clear()
            _measure(num_tokens, _Timed)
            checks_s.append(_checks_s(_Timed.seconds))
        result[f"{num_tokens}_tokens"] = {
            "intake_us_per_sample": round(1e6 * statistics.median(whole_s), 2),
            "checks_us_per_sample": round(1e6 * statistics.median(checks_s), 3),
            "standard_deviation_us": round(1e6 * statistics.stdev(checks_s), 3),
            "share": round(statistics.median(checks_s) / statistics.median(whole_s), 4),
        }
        print(f"{num_tokens} tokens: {result[f'{num_tokens}_tokens']}", flush=True)
    hardware.write(arguments.output, result)


class _Timed(Lies):
    """Notes the seconds of each check."""

    seconds: ClassVar[list[float]] = []

    def lowest_plain_version(
        self, results: Results, policy_version: int, prompt_of: Callable[[int], Prompt | None]
    ) -> int | None:
        began_s = time.perf_counter()
        lowest = super().lowest_plain_version(results, policy_version, prompt_of)
        self.seconds.append(time.perf_counter() - began_s)
        assert lowest is not None, "nothing is left to check but the lowest version of each lease"
        return lowest


def _checks_s(seconds: list[float]) -> float:
    """Return the seconds of the checks of a sample, without the clock, and without the calls that were interrupted."""
    clock_s = statistics.median(-(time.perf_counter() - time.perf_counter()) for _ in range(10_000))
    usual = sorted(seconds)[: -max(1, len(seconds) // 200)]
    return (statistics.mean(usual) - clock_s) * len(seconds) / NUM_SAMPLES


def _measure(num_tokens: int, kind: type[Lies]) -> float:
    """Return the intake's seconds per sample."""
    intake = _intake(num_tokens, kind)
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        address = SocketFile.inside(Path(folder))
        worker = multiprocessing.get_context("spawn").Process(target=_work, args=(address, num_tokens))
        worker.start()
        seconds = asyncio.run(_serve(intake, address))
        worker.join()
    assert worker.exitcode == 0
    return seconds / NUM_SAMPLES


async def _serve(intake: Intake, address: Address) -> float:
    """Serve as `IntakeService` does, until the first leases are answered.

    Returns: the seconds of this thread from the first answer on, without its waits.
    """
    learner = LearnerChannel.bind(address, limits=LIMITS)
    started_s = 0.0
    num_answers = 0
    while num_answers < NUM_GROUPS:
        peer, message = await learner.receive()
        if isinstance(message, Results):
            started_s = started_s or time.thread_time()
            num_answers += 1
        outgoing = intake.handle(peer, message, time.monotonic())
        while intake.owes_grants:
            outgoing += intake.grants()
        for to, sent in outgoing:
            learner.send(to, sent)
    seconds = time.thread_time() - started_s
    ledger = intake.statistics().ledger
    assert ledger.buffered == ledger.in_flight == NUM_SAMPLES, "all answers are taken, and as many leases are granted"
    intake.draining = True
    learner.send(peer, Drain())
    await asyncio.sleep(0.1)  # the message leaves
    learner.close()
    return seconds


def _work(address: Address, num_tokens: int) -> None:
    asyncio.run(_answer_leases(address, num_tokens))


async def _answer_leases(address: Address, num_tokens: int) -> None:
    """Answer the first leases, a group per message, as a rollout worker whose engine is done with all at once."""
    worker = WorkerChannel(address, worker_id="w", incarnation="1", limits=LIMITS)
    await worker.connected(60)
    worker.send(Hello("w", "1", NUM_SAMPLES, 0, None, 1, 0, (), Work()))
    leases: list[Lease] = []
    while len(leases) < NUM_GROUPS:
        message = await worker.receive()
        if isinstance(message, Leases):
            leases.extend(message.leases)
    in_flight = 0
    for answer in [_answer(lease, number, num_tokens) for number, lease in enumerate(leases)]:
        while in_flight >= RESULTS_IN_FLIGHT:
            in_flight -= isinstance(await worker.receive(), Ack)
        assert worker.send(answer)
        in_flight += 1
    while not isinstance(await worker.receive(), Drain):
        pass
    worker.close()


def _intake(num_tokens: int, kind: type[Lies]) -> Intake:
    overrides = (
        f"algorithm.group_size={GROUP_SIZE}",
        f"learner.groups_per_step={NUM_GROUPS}",
        f"learner.microbatch_tokens={2 * (num_tokens + len(PROMPT))}",
        f"rollout.sampling.max_new_tokens={num_tokens}",
        f"data.max_prompt_tokens={len(PROMPT)}",
        "algorithm.max_staleness=1",
    )
    config = load_config("quickstart.yaml", overrides)
    return Intake(
        config,
        ledger=Ledger(),
        stream=PromptStream([Source("all", [Item("?", "1")])], lambda *_: PROMPT, seed=0, num_epochs=None),
        evaluation=Evaluation([], lambda _: None),
        offers=Offers(together=False, timeout_s=300.0, call_timeout_s=2.0),
        policy_version=0,
        history=(("learner", 0),),
        lies=kind(config, vocab_size=VOCAB_SIZE),
    )


def _answer(lease: Lease, number: int, num_tokens: int) -> Results:
    """Return a message with the answers to a lease."""
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
    return Results("learner", number, tuple(finished))


if __name__ == "__main__":
    main()
