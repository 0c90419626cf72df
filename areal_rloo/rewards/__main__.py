"""`python -m areal_rloo.rewards`: a worker process of a `RewardPool`. Started by one, ends with it.

In, over the pipe whose number is on the command line: what its scorer is made of, then one request after the other.
Out: a reply to each.
"""

from __future__ import annotations

import ctypes
import math
import numbers
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from areal_rloo.config import import_function
from areal_rloo.rewards.pool import Reply, RewardRequest

_PR_SET_PDEATHSIG = 1

Scorer = Callable[[RewardRequest], Any]


def main() -> None:
    """Serve until the other end is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also while a reward hangs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the pool ends its workers itself
    connection = Connection(int(sys.argv[1]))
    try:
        scorer: Scorer = import_function("rewards", sys.argv[2])(connection.recv_bytes())
    except Exception as error:  # noqa: BLE001 - making a scorer runs the user's code
        connection.send_bytes(msgspec.msgpack.encode(Reply(reason="reward_error", detail=str(error))))
        return
    connection.send_bytes(msgspec.msgpack.encode(Reply(reward=0.0)))
    while True:
        try:
            request = msgspec.msgpack.decode(connection.recv_bytes(), type=RewardRequest)
            connection.send_bytes(msgspec.msgpack.encode(_scored(scorer, request)))
        except (EOFError, OSError):
            return


def _scored(scorer: Scorer, request: RewardRequest) -> Reply:
    try:
        reward = scorer(request)
    except Exception as error:  # noqa: BLE001 - a reward is the user's code; whatever it raises drops its sample alone
        return Reply(reason="reward_error", detail="".join(traceback.format_exception(error))[-4000:])
    if not isinstance(reward, numbers.Real):
        return Reply(reason="reward_wrong_type", detail=f"expected a number, got {type(reward).__name__}")
    if not math.isfinite(reward):
        return Reply(reason="reward_not_finite", detail=f"the reward is {reward}")
    return Reply(reward=float(reward))


if __name__ == "__main__":
    main()
