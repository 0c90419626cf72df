"""A reward service over HTTP: gets each completion as JSON by POST, and answers with the reward.

    {"prompt", "completion", "turns", "prompt_ids", "completion_ids", "finish_reason", "answer", "purpose", "source",
     "fields"}   ─►   {"reward": number}, with "token_rewards" or "turn_rewards" if algorithm.returns=token

An answer of more than `_MOST_BYTES` and a redirect are refused: the completion gets no reward, and the reason says why.
Failed connections and the statuses 429, 502, 503 and 504 are retried until the deadline, so a service may restart. The
deadline starts with the first attempt; time in the queue does not count. Runs on the rollout worker's event loop.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from areal_rloo.decoding import read_body
from areal_rloo.errors import RewardError
from areal_rloo.rewards.functions import described_request
from areal_rloo.rewards.request import Returns, RewardRequest, WorkStatistics, Worth, read_worth

_HEADERS = {
    "Content-Type": "application/json",
    "Accept-Encoding": "identity",  # a few compressed bytes can become gigabytes
}
_MOST_BYTES = 16 * 2**20  # of an answer: rewards for half a million tokens
_RETRIED = frozenset({429, 502, 503, 504})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_MOST_CHARACTERS = 500  # of a wrong body, in an error message


class RewardServices:
    """One HTTP session for all services of a run. Make and use it on one event loop."""

    def __init__(self, *, num_at_once: int, deadline_s: float, returns: Returns) -> None:
        """`num_at_once` limits the requests in flight to all services together; `deadline_s` is for each completion."""
        import aiohttp  # noqa: PLC0415 - most runs have no service

        self._num_at_once, self._slots = num_at_once, asyncio.Semaphore(num_at_once)
        self._deadline_s, self._returns = deadline_s, returns
        self._num_queued, self._busy_s = 0, 0.0
        # The limits of aiohttp are off: its timeout would include the wait for a free connection.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )

    async def score(self, request: RewardRequest, url: str) -> Worth:
        """Ask the service at `url` for the reward of a completion.

        Raises:
            RewardError: no answer in time, an error status, or an answer that is no reward.
        """
        body = msgspec.json.encode({**described_request(request), "fields": request.item.fields})
        async with self._slot():
            failures: list[str] = []
            try:
                async with asyncio.timeout(self._deadline_s) as limit:
                    text = await self._answer(url, body, failures)
            except TimeoutError:
                assert limit.expired(), "only our deadline raises this: the session has no timeout"
                last = f"; the last attempt: {failures[-1]}" if failures else ""
                raise RewardError("reward_timeout", f"{url}: no reward within {self._deadline_s:g} s{last}") from None
        try:
            value = json.loads(text)  # accepts NaN, which services in Python write
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            detail = f'{url}: expected {{"reward": number}} as JSON, got {text[:_MOST_CHARACTERS]}'
            raise RewardError("reward_wrong_type", detail)
        return read_worth(value, request, returns=self._returns)

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(
            runner="services", num_at_once=self._num_at_once, num_queued=self._num_queued, busy_s=self._busy_s
        )

    async def close(self) -> None:
        """Close the session; discard running rewards."""
        await self._session.close()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Wait until a request may start, and count its time."""
        self._num_queued += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_queued -= 1
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._slots.release()
            self._busy_s += time.monotonic() - began_s

    async def _answer(self, url: str, body: bytes, failures: list[str]) -> str:
        """Return the body of the first answer with a success status; append each failed attempt to `failures`."""
        import aiohttp  # noqa: PLC0415 - as in `__init__`

        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with self._session.post(url, data=body, headers=_HEADERS, allow_redirects=False) as answer:
                    content = await read_body(answer.content, most_bytes=_MOST_BYTES)
            except aiohttp.InvalidURL as error:
                raise RewardError("reward_error", f"{url}: not a valid URL: {error}") from error
            except (aiohttp.ClientError, OSError) as error:
                failures.append(f"{type(error).__name__}: {error}")
            else:
                if content is None:
                    raise RewardError("reward_error", f"{url}: the answer has more than {_MOST_BYTES} bytes")
                text = content.decode(errors="replace")
                if answer.status < 300:
                    return text
                if answer.status < 400:
                    target = answer.headers.get("Location", "")[:_MOST_CHARACTERS]
                    detail = f"{url}: status {answer.status}, a redirect to {target!r}; set url to the final address"
                    raise RewardError("reward_error", detail)
                failures.append(f"status {answer.status}: {text[:_MOST_CHARACTERS]}")
                if answer.status not in _RETRIED:
                    raise RewardError("reward_error", f"{url}: {failures[-1]}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
