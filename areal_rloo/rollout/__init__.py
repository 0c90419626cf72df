"""The rollout worker: leases in, scored trajectories out, new weights taken on the way."""
