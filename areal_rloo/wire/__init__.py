"""ZeroMQ between the learner and the rollout workers; the only package that knows ZeroMQ.

`messages` is the whole protocol. `codec` turns messages into frames and back, `columns` the trajectories, `turns`
partial rollouts; `token_rules` has the rules of both. `envelope` has the version and the checksum of a message.
`channels` has the two ends as asyncio sockets, `peers` the limits of each peer. `address` says where the ends meet,
`security` makes and loads CURVE keys.
"""
