"""A reward over HTTP: each completion is POSTed as JSON, and the service says what it is worth.

    {"prompt", "completion", "turns", "prompt_ids", "completion_ids", "finish_reason", "answer", "purpose", "source",
     "fields"}   ─►   {"reward": number}, with "token_rewards" or "turn_rewards" where the algorithm takes them

A service that restarts costs nothing: a connection that fails, and the statuses 429, 502, 503 and 504, are tried again
until the deadline, which counts from the first attempt. What waits for its turn has not begun.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import msgspec

from areal_rloo.errors import RewardError
from areal_rloo.rewards.functions import described_request
from areal_rloo.rewards.request import RewardRequest, WorkStatistics, Worth
from areal_rloo.rewards.values import Returns, read_worth

if TYPE_CHECKING:
    import aiohttp

_PASSING = frozenset({429, 502, 503, 504})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_MOST_CHARACTERS = 500  # of a body that is no reward


class RewardServices:
    """One HTTP session for all services of a run. Made and used on one event loop."""

    def __init__(self, *, num_at_once: int, deadline_s: float, returns: Returns) -> None:
        """
        Args:
            num_at_once: completions under way at a time, all services together.
            deadline_s: of one completion, from when it is first sent.
            returns: `algorithm.returns`.
        """
        import aiohttp  # noqa: PLC0415 - most runs have no service

        self._slots = asyncio.Semaphore(num_at_once)
        self._deadline_s = deadline_s
        self._returns = returns
        self._busy_s = 0.0
        # Its own limits are off: ours count from when a completion is sent, not from when it waits for a connection.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def score(self, request: RewardRequest, url: str) -> Worth:
        """What the service says of one completion.

        Raises:
            RewardError: it says nothing in time, an error, or something that is no reward.
        """
        body = msgspec.json.encode({**described_request(request), "fields": request.item.fields})
        async with self._slots:
            began_s = time.monotonic()
            attempts = _Attempts(self._session, url, body)
            try:
                async with asyncio.timeout(self._deadline_s) as limit:
                    text = await attempts.answer()
            except TimeoutError:
                assert limit.expired(), "the session has no time limit of its own"
                last = f"; the last attempt: {attempts.met}" if attempts.met else ""
                raise RewardError("reward_timeout", f"{url}: no reward within {self._deadline_s:g} s{last}") from None
            finally:
                self._busy_s += time.monotonic() - began_s
        try:
            value = json.loads(text)  # takes NaN, which services in Python write
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RewardError(
                "reward_wrong_type", f'{url}: expected {{"reward": number}} as JSON, got {text[:_MOST_CHARACTERS]}'
            )
        return read_worth(value, request, returns=self._returns)

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(busy_s=self._busy_s)

    async def close(self) -> None:
        """End the session; what is being scored is lost."""
        await self._session.close()


class _Attempts:
    """Sending one completion until an answer comes. `met` is what the last attempt ended with."""

    def __init__(self, session: aiohttp.ClientSession, url: str, body: bytes) -> None:
        self._session = session
        self._url = url
        self._body = body
        self.met = ""

    async def answer(self) -> str:
        """The body of an answer of status 200 and its like.

        Raises:
            RewardError: another status that will not pass by itself.
        """
        import aiohttp  # noqa: PLC0415 - as above

        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with self._session.post(
                    self._url, data=self._body, headers={"Content-Type": "application/json"}
                ) as answer:
                    text = (await answer.read()).decode(errors="replace")
            except aiohttp.InvalidURL as error:
                raise RewardError("reward_error", f"{self._url}: it is no valid URL: {error}") from error
            except (aiohttp.ClientError, OSError) as error:
                self.met = f"{type(error).__name__}: {error}"
            else:
                if answer.ok:
                    return text
                self.met = f"status {answer.status}: {text[:_MOST_CHARACTERS]}"
                if answer.status not in _PASSING:
                    raise RewardError("reward_error", f"{self._url}: {self.met}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
