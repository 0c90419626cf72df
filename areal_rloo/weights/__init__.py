"""New weights from the learner to the rollout workers: manifest, buckets, transports, and who has which version."""
