"""The learner: intake, training loop, checkpoints."""
