"""Shrink a run to a smaller one with the same staleness and the same shares of waiting, for a simulation in seconds.

Two ways, both near the truth while many samples are in flight:

- Fewer workers. With a k-th of the workers and of the groups of a step, and k times the training time of a token, each
  worker has the same work in the same time.
- Shorter steps. With a k-th of the groups of a step, and a k-th of each time that does not depend on tokens, a step
  takes a k-th of the time. A completion takes as long as before, so a slot must still decode many in a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from areal_rloo.advice.simulation import Setup, Speeds

MOST_SAMPLES = 8192  # of a step, those of dropped groups included: a forecast then takes three seconds
_LEAST_WORKERS = 4
_LEAST_ROUNDS = 32  # completions of a slot in a step
_LEAST_GROUPS = 8


class Shrunk(NamedTuple):
    """A run to simulate; each token a second stands for `scale` of the real run."""

    speeds: Speeds
    setup: Setup
    scale: float


def shrunk(speeds: Speeds, setup: Setup, group_size: int, most_samples: int = MOST_SAMPLES) -> Shrunk:
    """Shrink a run to about `most_samples` a step; one that is small enough stays as it is."""
    samples = setup.groups_per_step * group_size / setup.kept_share
    rounds = samples / (setup.num_workers * setup.num_slots)
    shorter = max(1.0, min(samples / most_samples, rounds / _LEAST_ROUNDS))
    fewer = max(1.0, min(samples / shorter / most_samples, setup.num_workers / _LEAST_WORKERS))
    if shorter * fewer == 1:
        return Shrunk(speeds, setup, 1.0)
    num_workers = max(1, round(setup.num_workers / fewer))
    num_groups = min(setup.groups_per_step, max(_LEAST_GROUPS, round(setup.groups_per_step / (shorter * fewer))))
    share = setup.groups_per_step / num_groups  # of a step
    train, decode = share / shorter, share * num_workers / setup.num_workers / shorter  # rounded counts cost nothing
    small_speeds = Speeds(
        decode_fixed_s=speeds.decode_fixed_s * decode,
        decode_each_s=speeds.decode_each_s * decode,
        prefill_s=speeds.prefill_s * decode,
        train_fixed_s=speeds.train_fixed_s / shorter,
        train_token_s=speeds.train_token_s * train,
        exchange_token_s=speeds.exchange_token_s * train,
        broadcast_s=speeds.broadcast_s / shorter,
    )
    ahead = setup.lease_ahead
    small_setup = replace(
        setup,
        num_workers=num_workers,
        groups_per_step=num_groups,
        num_eval=round(setup.num_eval / share),
        lease_ahead=None if ahead is None else round(ahead / shorter),
    )
    return Shrunk(small_speeds, small_setup, train)
