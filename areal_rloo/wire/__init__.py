"""ZeroMQ between the learner and the rollout workers: messages, codec, channels, keys. Nothing else knows ZeroMQ."""
