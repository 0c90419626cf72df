"""Stages of post-training that stand alone, without a learner or without rollout workers. Each is a program.

- `samples`: runs the engine, the episode and the rewards of a config in this process: wanted samples in, samples out.
- `source`: the config and the model that a command line names: a config, or a run folder with a checkpoint.
- `evaluate`: measures a model on the evaluation sets of a config.
- `generate`: writes samples of the train prompts, with tokens, logprobs and rewards, to a file.
- `sft`: trains on demonstrations, with `examples` for the token ids. `offline`: trains on saved samples, of which
  `saved_samples` reads the rows. Both are a `training` in this process, which `begin` starts or resumes; `held_out`
  measures a policy.
- `export`: copies the model of a checkpoint, with a model card.
"""
