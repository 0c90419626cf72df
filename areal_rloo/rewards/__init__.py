"""Scores completions: a completion goes in, the weighted sum of its source's reward parts comes out.

`request`      a completion to score, the reward, and the check of every value that a reward returns
`scoring`      scores the parts of each completion, and sums them
`parts`        lists the reward parts of a config, starts everything that runs them, and makes their scorer in a process
`functions`    calls a reward function of the user
`pool`         worker processes for tasks and functions, one reward at a time in each
`async_pool`   one worker process for async functions, many rewards at a time
`outage`       replaces processes that died
`process`      starts, asks and kills a worker process
`__main__`     runs in a worker process
`service`      sends completions to a reward service over HTTP
`model`        runs a reward model (imports torch)
"""

from areal_rloo.rewards.parts import check_rewards, make_scoring, reward_parts

__all__ = ["check_rewards", "make_scoring", "reward_parts"]
