"""A large step, or a large evaluation, is leased a part at a time, so that messages need not wait for all of it."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.intakes import LEARNER, ONE_GROUP, duties_of, fail, heartbeat, make_broadcaster, make_intake, make_offers
from support.patience import eventually
from support.protocols import make_trajectory
from support.workers import fresh_address

from areal_rloo.intake.evaluation import EvalSet, Evaluation
from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.prompts import Prompt, PromptStream
from areal_rloo.intake.service import IntakeService
from areal_rloo.tasks import Item, Source
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import (
    Ack,
    Goodbye,
    HeartbeatReply,
    Hello,
    LearnerMessage,
    Leases,
    Welcome,
    Work,
    WorkerMessage,
)

LARGE_STEP = ("algorithm.group_size=16", "learner.groups_per_step=256", "algorithm.max_staleness=0")  # 4,096 samples


def _hello(worker_id: str, capacity: int) -> Hello:
    return Hello(worker_id, "1", capacity, 0, None, 1, 0, (), Work())


def test_a_large_step_is_leased_a_part_at_a_time() -> None:
    intake = make_intake(make_offers(), *LARGE_STEP)
    duties = duties_of(intake.handle("w", _hello("w", 4096), 0.0))
    assert (len(duties), intake.owes_grants) == (256, True)
    answers = fail(intake, "w", duties[:1])  # the sample is dropped
    assert [type(message) for _, message in answers] == [Ack]  # without another part
    parts = [duties_of(intake.grants()) for _ in range(16)]
    assert [len(part) for part in parts] == [256] * 15 + [0]
    assert not intake.owes_grants
    assert len({duty.sample_id for part in (duties, *parts) for duty in part}) == 4096


def test_a_drain_ends_a_large_step() -> None:
    intake = make_intake(make_offers(), *LARGE_STEP)
    intake.handle("w", _hello("w", 4096), 0.0)
    intake.draining = True
    assert (intake.owes_grants, intake.grants()) == (False, [])


def _leased(num_groups: int, capacities: Mapping[str, int]) -> tuple[list[Outgoing], dict[str, int]]:
    """Lease a step to workers that come together; return the messages, and the room of each worker before."""
    intake = make_intake(make_offers(), *LARGE_STEP, f"learner.groups_per_step={num_groups}")
    intake.draining = True
    for name, capacity in capacities.items():
        intake.handle(name, _hello(name, capacity), 0.0)
    intake.draining = False
    room = {name: worker.free_samples for name, worker in intake.fleet.alive.items()}
    return _all_grants(intake), room


def _all_grants(intake: Intake) -> list[Outgoing]:
    sent = intake.grants()
    while intake.owes_grants:
        sent.extend(intake.grants())
    return sent


@pytest.mark.parametrize(("num_groups", "num_parts"), [(8, 1), (64, 4), (256, 16)])
def test_a_worker_gets_its_share_of_a_step_in_few_messages(num_groups: int, num_parts: int) -> None:
    sent, _ = _leased(num_groups, dict.fromkeys("abcd", 4096))
    assert {name: len(duties_of(sent, name)) for name in "abcd"} == dict.fromkeys("abcd", 4 * num_groups)
    assert len(sent) <= num_parts + 3, "a share that lies in several parts goes out in as many messages"


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_those_of_group_by_group_to_the_most_room(seed: int) -> None:
    draw = random.Random(seed)
    num_groups = draw.randint(1, 300)
    sent, room = _leased(num_groups, {name: draw.randint(1, 2000) for name in "abcdefg"})
    left = dict(room)
    for _ in range(num_groups):
        most = max(left, key=lambda name: left[name])
        left[most] -= 16 * (left[most] > 0)
    shares = {name: (len(duties_of(sent, name)), room[name] - left[name]) for name in room}
    assert all(abs(share - slowly) <= 16 for share, slowly in shares.values()), shares


def _two_with_room(intake: Intake) -> None:
    intake.draining = True
    for name in "bc":
        intake.handle(name, _hello(name, 4096), 0.0)
    intake.draining = False


def test_the_last_prompts_are_shared_although_a_step_may_have_more() -> None:
    stream = PromptStream([Source("all", [Item("?")] * 40)], lambda *_: (1, 2), seed=0, num_epochs=1)
    intake = make_intake(make_offers(), *LARGE_STEP, stream=stream)
    _two_with_room(intake)
    sent = _all_grants(intake)
    assert {name: len(duties_of(sent, name)) for name in "bc"} == {"b": 320, "c": 320}


def test_single_lost_samples_of_many_groups_are_shared() -> None:
    intake = make_intake(make_offers(), *LARGE_STEP, "learner.groups_per_step=48")
    duties = duties_of(intake.handle("a", _hello("a", 768), 0.0) + _all_grants(intake))
    for duty in duties:  # of each group, a single sample has not come yet
        if duty.sample_index:
            intake.ledger.finish(duty.sample_id, (make_trajectory(duty),))
            intake.fleet.release(intake.fleet.alive["a"], duty)
    _two_with_room(intake)
    sent = intake.handle("a", Goodbye(LEARNER, Work(), failed=False), 0.0)
    assert {name: len(duties_of(sent, name)) for name in "bc"} == {"b": 24, "c": 24}


def test_the_evaluation_of_two_dead_workers_is_shared() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP)
    prompts = [Prompt(0, index, (1, 2), Item("?")) for index in range(1000)]
    intake.evaluation = intake._leasing.evaluation = Evaluation([EvalSet("mine", prompts)], lambda record: None)
    for name in "abcd":
        intake.handle(name, _hello(name, 2), 0.0)
    intake.evaluate()
    _all_grants(intake)
    for name in "bd":
        intake.fleet.alive[name].last_heard_s = 20.0
    sent = intake.tick(20.1) + _all_grants(intake)  # `a` and `c` were on the same host
    assert [sum(duty.purpose == "eval" for duty in duties_of(sent, name)) for name in "bd"] == [250, 250]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_large_evaluation_is_leased_a_part_at_a_time(num_workers: int) -> None:
    intake = make_intake(make_offers(), *ONE_GROUP)
    prompts = [Prompt(0, index, (1, 2), Item("?")) for index in range(2500)]
    intake.evaluation = intake._leasing.evaluation = Evaluation([EvalSet("mine", prompts)], lambda record: None)
    names = [f"w{index}" for index in range(num_workers)]
    for name in names:
        intake.handle(name, _hello(name, 2), 0.0)
    sent, owes = intake.evaluate(), [intake.owes_grants]
    while owes[-1]:
        sent += intake.grants()
        owes.append(intake.owes_grants)
    assert owes == ([True] * 9 + [False] if num_workers else [False])
    by_worker = Counter(peer for peer in names for duty in duties_of(sent, peer) if duty.purpose == "eval")
    assert by_worker == ({"w0": 834, "w1": 833, "w2": 833} if num_workers else {})


def test_messages_are_answered_between_the_parts_of_a_large_step(tmp_path: Path) -> None:
    class Scripted(LearnerChannel):
        async def receive(self) -> tuple[str, WorkerMessage]:
            if not script:
                await asyncio.sleep(1000.0)
            return "00", script.pop(0)

        def send(self, peer: str, message: LearnerMessage) -> bool:
            sent.append(message)
            return True

    script: list[WorkerMessage] = [_hello("w", 4096), heartbeat()]
    sent: list[LearnerMessage] = []
    broadcaster = make_broadcaster(tmp_path)
    intake = make_intake(broadcaster.offers, *LARGE_STEP)
    service = IntakeService(intake, broadcaster, lambda: Scripted.bind(fresh_address(), limits=Limits()), heartbeat_s=1)
    eventually(lambda: sum(isinstance(message, Leases) for message in sent) == 16, "a part of the step is missing")
    service.close()
    assert [type(message) for message in sent[:4]] == [Welcome, Leases, HeartbeatReply, Leases]
    assert sum(len(lease.duties) for message in sent if isinstance(message, Leases) for lease in message.leases) == 4096
