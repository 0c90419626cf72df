"""The intake on a thread, and workers with real sockets."""

import asyncio
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.intakes import MANIFEST, make_broadcaster, make_intake
from support.workers import ENGINE, LIMITS, Played, fresh_address

from areal_rloo.errors import UserError
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.service import IntakeService
from areal_rloo.launcher.learner_log import LearnerLog
from areal_rloo.rollout.protocol import Orders, WorkerProtocol
from areal_rloo.telemetry.logs import get_logger, setup_logs
from areal_rloo.trajectory import Completion, Group, Trajectory
from areal_rloo.weights.manifest import gather
from areal_rloo.wire.address import Address
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.messages import Duty, Failed, Lease

pytestmark = pytest.mark.usefixtures("no_blocked_loop")


def _intake(
    folder: Path, *overrides: str, ledger: Ledger | None = None, stream: PromptStream | None = None
) -> IntakeService:
    broadcaster = make_broadcaster(folder)
    return IntakeService(
        make_intake(broadcaster.offers, *overrides, ledger=ledger, stream=stream),
        broadcaster,
        lambda: LearnerChannel.bind(fresh_address(), limits=LIMITS),
        heartbeat_s=1,
    )


async def _until_drained(
    address: Address, worker_id: str, *, welcomed: asyncio.Event, may_leave: asyncio.Event
) -> None:
    worker = Played.at(address, worker_id, capacity_samples=0)
    drained = False

    def obey(orders: Orders) -> None:
        nonlocal drained
        welcomed.set()
        drained |= orders.drain

    await worker.serve(obey, until=lambda: drained)
    await may_leave.wait()
    worker.channel.send(worker.protocol.goodbye(ENGINE, failed=False))
    worker.channel.close()


async def _answer_leases(
    address: Address, until: Callable[[], bool], answer: Callable[[WorkerProtocol, Lease, Duty], object]
) -> None:
    """Answer every leased sample, as a worker does, until the condition is true."""
    worker = Played.at(address, "rollout-0")  # an expected worker: the votes of others wait for it

    def obey(orders: Orders) -> None:
        for lease in orders.start:
            for duty in lease.duties:
                answer(worker.protocol, lease, duty)

    await worker.serve(obey, until=until)
    worker.channel.close()


def _completion(num: int) -> Completion:
    return Completion(np.full(num, 2, np.int32), np.full(num, -1, np.float32), np.zeros(num, np.int32), "stop")


def _trajectory(lease: Lease, duty: Duty, *, num_tokens: int = 1, reward: float = 1.0) -> Trajectory:
    prompt = np.array(lease.prompt_tokens, np.int32)
    return Trajectory(*duty.sample_id, prompt, _completion(num_tokens), reward)


def test_a_worker_that_joins_during_the_drain_is_drained_too(tmp_path: Path) -> None:
    intake = _intake(tmp_path)
    address = intake.channel.address
    stopping = threading.Thread(target=intake.stop_workers, args=(60.0,))

    async def scenario() -> None:
        first, late, may_leave = asyncio.Event(), asyncio.Event(), asyncio.Event()
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(_until_drained(address, "first", welcomed=first, may_leave=may_leave))
            await first.wait()
            stopping.start()
            while not intake.draining:  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.01)
            tasks.create_task(_until_drained(address, "late", welcomed=late, may_leave=may_leave))
            await late.wait()
            may_leave.set()

    asyncio.run(scenario())
    stopping.join(timeout=120)
    assert not stopping.is_alive()
    assert intake.statistics().num_workers == 0
    intake.close()


def test_a_wait_with_only_dropped_groups_is_told_with_the_reasons(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A filter that refuses every group causes this: trajectories arrive, but the batch stays empty."""
    monkeypatch.setattr("areal_rloo.intake.service._WAIT_LOG_S", 0.05)
    setup_logs("learner", level="info", file=tmp_path / "learner.log")
    get_logger("areal_rloo").addHandler(caplog.handler)
    intake = _intake(tmp_path, "algorithm.min_reward_std=0.1", "algorithm.group_size=2")
    address = intake.channel.address
    waiting = threading.Thread(target=intake.take_batch)
    waiting.start()

    def warned() -> bool:
        return any("low_reward_std" in record.getMessage() for record in caplog.records)

    def answer(protocol: WorkerProtocol, lease: Lease, duty: Duty) -> None:
        protocol.finish(duty, [_trajectory(lease, duty)], 100)

    asyncio.run(asyncio.wait_for(_answer_leases(address, warned, answer), 60))
    intake.begin_drain()
    waiting.join(timeout=120)
    intake.close()
    get_logger("areal_rloo").removeHandler(caplog.handler)
    assert warned()
    said: list[str] = []
    log = LearnerLog(tmp_path / "copied.log", said.append)
    (tmp_path / "copied.log").write_text((tmp_path / "learner.log").read_text())
    log.look()
    assert re.match(r"waits for the next batch, \d+ s so far: 0 groups ready; .*low_reward_std", log.wait)
    assert said == []


def test_rewards_that_all_fail_end_the_wait_with_the_reason(tmp_path: Path) -> None:
    intake = _intake(tmp_path, "algorithm.group_size=2")
    address = intake.channel.address
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            intake.take_batch()
        except UserError as error:
            raised.append(error)

    def fail(protocol: WorkerProtocol, lease: Lease, duty: Duty) -> None:
        protocol.fail(Failed(*duty, "reward_error", "ValueError: no", "", 3), 100)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    asyncio.run(asyncio.wait_for(_answer_leases(address, lambda: not waiting.is_alive(), fail), 60))
    waiting.join()
    intake.close()
    assert "the first: reward_error: ValueError: no" in str(raised[0])


def test_a_restarted_worker_is_offered_the_version_its_process_lost(tmp_path: Path) -> None:
    intake = _intake(tmp_path)
    address = intake.channel.address
    offers: list[tuple[str, int]] = []

    async def offered(incarnation: str) -> None:
        worker = Played.at(address, "w", incarnation, capacity_samples=0)
        num = len(offers)

        def obey(orders: Orders) -> None:
            if orders.receive is not None:
                offers.append((incarnation, orders.receive.policy_version))

        await worker.serve(obey, until=lambda: len(offers) > num)
        worker.channel.close()  # without a word, as a killed process

    async def scenario() -> None:
        intake.commit(1, partial(gather, MANIFEST, [("w", torch.ones(8))]), evaluate=False)
        async with asyncio.timeout(60):
            await offered("1")
            await offered("2")

    asyncio.run(scenario())
    intake.stop_workers(0)
    intake.close()
    assert offers == [("1", 1), ("2", 1)]


def test_a_trajectory_longer_than_a_row_is_dropped_with_its_id(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    get_logger("areal_rloo").addHandler(caplog.handler)
    small = ("algorithm.group_size=4", "learner.groups_per_step=2", "learner.microbatch_tokens=200")
    intake = _intake(tmp_path, *small, "evaluation.max_new_tokens=400")  # a context may be longer than a row
    address = intake.channel.address
    batches: list[list[Group] | None] = []
    waiting = threading.Thread(target=lambda: batches.append(intake.take_batch()))
    waiting.start()

    def answer(protocol: WorkerProtocol, lease: Lease, duty: Duty) -> None:
        index = duty.sample_index
        num = {0: 199, 1: 200}.get(index, 5)  # 200 and 201 inputs less than one, of at most 200
        protocol.finish(duty, [_trajectory(lease, duty, num_tokens=num, reward=float(index))], 2000)

    asyncio.run(asyncio.wait_for(_answer_leases(address, lambda: not waiting.is_alive(), answer), 60))
    waiting.join()
    statistics = intake.statistics()
    intake.close()
    get_logger("areal_rloo").removeHandler(caplog.handler)
    (batch,) = batches
    assert batch is not None
    assert [[t.sample_index for t in group.trajectories] for group in batch] == [[0, 2, 3]] * 2
    assert statistics.ledger.dropped["too_long"] >= 2
    assert f"sample ({batch[0].group_id}, 1) has 202 tokens, more than learner.microbatch_tokens=200" in caplog.text


def test_a_learner_that_was_blocked_welcomes_a_restarted_worker_at_once(tmp_path: Path) -> None:
    """Although the Hello of the new process can be read before the end of the old connection."""
    intake = _intake(tmp_path)
    address = intake.channel.address

    async def welcomed(worker: Played) -> None:
        has_orders: list[Orders] = []
        async with asyncio.timeout(30):
            await worker.serve(has_orders.append, until=lambda: bool(has_orders))

    async def scenario() -> None:
        worker = Played.at(address, "w", "0", capacity_samples=0)
        await welcomed(worker)
        for number in range(1, 6):
            free = threading.Event()
            blocked = threading.Thread(target=intake.call, args=(free.wait,))
            blocked.start()
            await asyncio.sleep(0.05)
            worker.channel.close()  # without a word, as a killed process
            worker = Played.at(address, "w", str(number), capacity_samples=0)
            threading.Timer(0.3, free.set).start()
            await welcomed(worker)
            blocked.join()
        worker.channel.close()

    asyncio.run(scenario())
    refused = intake.fleet.statistics(0.0).refused_workers
    intake.stop_workers(0)
    intake.close()
    assert refused == {}
