"""The rollout worker: runs the episodes of leased samples around an engine, and sends the trajectories to the learner.

`protocol`        the worker's end of the protocol: duties, outbox, heartbeats, without I/O
`worker`          the event loop of a rollout worker: leases in, trajectories out
`episode`         the contract of an episode, a conversation as it grows, a single turn, and the engine of an episode
`partial`         partial rollouts: the turns of an unfinished sample, saved and continued
`deadline`        runs an episode, which may be the user's code, at the cost of its own sample at most
`multi_turn`      the episodes of several turns: with a verifier, and with tools
`agent`           the episode of a user's agent that talks to a chat endpoint
`episode_types`   makes the episode that the config names
`trial`           tries the user's episode in a process of its own, before a run starts
`chat_server`     the chat endpoint over HTTP, for agents
`chat_api`        reads and writes the JSON of the chat endpoint
`sessions`        the calls of one agent, as conversations of token ids
`engines`         makes the engine, and connects a server engine to the weights
`__main__`        starts a rollout worker from a run folder
"""
