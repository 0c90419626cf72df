"""How the ends of the wire share their event loop with other tasks, and take sends while they wait."""

import asyncio
import time

import pytest
from support.workers import Ends, connected_channel, fresh_address, make_channel

from areal_rloo.wire.address import Address
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Drain, Goodbye, Work

LIMITS = Limits(max_message_bytes=2**22)
GOODBYE = Goodbye(None, Work())
_WORK_S = 50e-6  # for a message


def test_a_send_takes_no_message_from_a_receive_that_waits(ends: Ends) -> None:
    """The descriptor of a socket tells once that something has come, and a send may be told."""

    async def scenario(learner: LearnerChannel, address: Address) -> None:
        worker = await connected_channel(address, limits=LIMITS)
        assert worker.send(GOODBYE)
        peer, _ = await learner.receive()
        for _ in range(5):
            receiving = asyncio.create_task(learner.receive())
            await asyncio.sleep(0.02)  # now it waits
            assert worker.send(GOODBYE)
            time.sleep(0.02)  # noqa: ASYNC251 - the message comes while the loop is busy
            assert learner.send(peer, Drain())
            assert await receiving == (peer, GOODBYE)
        worker.close()

    ends.run(scenario, limits=LIMITS)


def test_a_worker_can_send_while_it_waits_for_the_learner() -> None:
    async def main() -> None:
        worker = make_channel(fresh_address(), limits=LIMITS)
        waiting = asyncio.create_task(worker.connected(0.1))
        await asyncio.sleep(0)
        assert not worker.send(GOODBYE)
        assert not await waiting
        worker.close()

    asyncio.run(main())


def test_a_send_after_the_end_is_lost() -> None:
    async def main() -> None:
        learner = LearnerChannel.bind(fresh_address(), limits=LIMITS)
        learner.close()
        assert not learner.send("00", Drain())

    asyncio.run(main())


def test_a_task_of_several_turns_ends_between_two_rounds_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the training thread takes three turns of the loop, and a round of messages can take 10 ms."""

    async def scenario(learner: LearnerChannel, address: Address) -> None:
        num_rounds, read_round = 0, learner._read_round

        def counted() -> bool:
            nonlocal num_rounds
            num_rounds += 1
            return read_round()

        async def serve() -> None:
            while True:
                await learner.receive()
                ends_s = time.perf_counter() + _WORK_S
                while time.perf_counter() < ends_s:
                    pass

        monkeypatch.setattr(learner, "_read_round", counted)
        monkeypatch.setattr(learner._allowances, "admits", lambda *_: True)
        worker = await connected_channel(address, limits=LIMITS)
        for _ in range(20_000):
            assert worker.send(GOODBYE)
        serving = asyncio.create_task(serve())
        passed = []
        while num_rounds < 20:
            began = num_rounds
            for _ in range(3):
                await asyncio.sleep(0)
            passed.append(num_rounds - began)
        serving.cancel()
        worker.close()
        assert max(passed) == 1

    Ends(fresh_address()).run(scenario, limits=LIMITS)
