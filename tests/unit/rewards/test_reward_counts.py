"""The counts of the completions that a worker scores."""

import asyncio

from support.reward_requests import reward_request

from areal_rloo.errors import RewardError
from areal_rloo.rewards.request import RewardRequest, Worth
from areal_rloo.rewards.scoring import Part, Scoring, SourceRewards
from areal_rloo.trajectory import Item

ITEM = Item("1+1", "2")


def test_completions_that_wait_for_a_reward_are_counted() -> None:
    async def counts() -> list[int]:
        go_on = asyncio.Event()

        async def score(request: RewardRequest) -> Worth:
            await go_on.wait()
            if request.completion == "fails":
                raise RewardError("reward_error", "no")
            return Worth(reward=1.0)

        async def close() -> None:
            pass

        scoring = Scoring({("train", ITEM.source): SourceRewards([Part("one", 1.0, score)])}, [], close)
        requests = [reward_request(text, ITEM) for text in ("fails", "scored", "scored")]
        running = [asyncio.create_task(scoring.score(request)) for request in requests]
        await asyncio.sleep(0)
        waiting = [scoring.statistics().waiting]
        go_on.set()
        await asyncio.gather(*running, return_exceptions=True)
        return [*waiting, scoring.statistics().waiting, scoring.statistics().scored]

    assert asyncio.run(counts()) == [3, 0, 2]
