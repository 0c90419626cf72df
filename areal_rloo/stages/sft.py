"""`areal-rloo sft --config X.yaml`: train on demonstrations, in this process, by the learner of RL runs.

    data.train ─► prompts and demonstrations as token ids ─► packed rows ─► L = - mean_t log current_t

L is the loss of `kind: reinforce` with the advantage 1 for every token of a demonstration, at temperature 1. The mean
is over the tokens of a minibatch.

On samples of a teacher (`areal-rloo generate`), this is distillation of sequences (arXiv:1606.07947, section 3.2, with
samples in place of a beam search). The gradient estimates that of KL(teacher || policy), whose other term, the entropy
of the teacher, is constant. The loss less the teacher's own loss on the samples estimates this KL in nats a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from areal_rloo.config import (
    AlgorithmConfig,
    BehaviourWeightConfig,
    Config,
    LossConfig,
    NormConfig,
    RolloutConfig,
    SamplingConfig,
)
from areal_rloo.program import Parser
from areal_rloo.stages.begin import Model, Program, begin, parse
from areal_rloo.stages.examples import Encoder, load_examples
from areal_rloo.stages.training import Data, Numbers, run_to_end, source_of
from areal_rloo.tasks.chat import chat_format
from areal_rloo.telemetry.logs import run_to_exit_code

_DESCRIPTION = """\
Train a model on demonstrations: the completions, or the turns of the assistant, of data.train.
A step takes learner.groups_per_step examples. data.eval are held-out examples.

examples:
  areal-rloo sft --config gsm8k_rloo.yaml data.num_epochs=3 learner.num_train_steps=auto
  areal-rloo sft --config my.yaml 'data.train={task: demonstrations, path: chats.jsonl}' run.folder=runs/chats
  areal-rloo sft --config my.yaml run.folder=runs/chats --resume"""


def main(arguments: Sequence[str]) -> int:
    """Train, and print a line for each step; the last line is the folder of the model.

    Raises:
        UserError: an argument, the config, the data or the model is wrong.
    """
    options, config = parse(Parser(prog="areal-rloo sft", description=_DESCRIPTION, overrides=True), arguments)
    program = Program(name="sft", learner_config=supervised, load=_load, show=_words)
    return run_to_exit_code(lambda: run_to_end(begin(program, config, resume=options.resume)))


def supervised(config: Config) -> Config:
    """Return the config of a learner whose loss is the mean cross entropy of the tokens."""
    loss = LossConfig(kind="reinforce", proximal="reuse", behaviour_weight=BehaviourWeightConfig(rule="ignore"))
    staleness = config.algorithm.max_staleness
    algorithm = AlgorithmConfig(group_size=1, max_staleness=staleness, adv_norm=NormConfig(), loss=loss)
    sampling = SamplingConfig(max_new_tokens=config.rollout.sampling.max_new_tokens)  # temperature 1
    rollout = RolloutConfig(sampling=sampling, episode=config.rollout.episode)
    return msgspec.structs.replace(config, algorithm=algorithm, rollout=rollout)


def _load(config: Config, model: Model) -> Data:
    chat = chat_format(model.tokenizer, config)
    train, held_out = load_examples(config, Encoder(config, chat, vocab_size=model.vocab_size))
    for examples in train:
        print(examples.words())  # noqa: T201 - users read this line
    # Another label than in an RL run: neither program resumes from a checkpoint of the other.
    labels = [f"demonstrations of {examples.label}" for examples in train]
    groups = [[(trajectory,) for trajectory in examples.trajectories] for examples in train]
    weights = [examples.weight for examples in train]
    sources = [(source_of(*source), source[1]) for source in zip(labels, groups, weights, strict=True)]
    return Data(sources, {examples.label: examples.trajectories for examples in held_out})


def _words(record: Numbers) -> str:
    teacher = f" (the teacher's {record['behaviour_loss']:.4f})" if record["behaviour_loss"] else ""
    return (
        f"loss {record['loss']:.4f}{teacher}, entropy {record['entropy']:.3f}, learning rate "
        f"{record['learning_rate']:.2e}, epoch {record['epoch'] + 1}, {record['trained_tokens']:,} tokens learned, "
        f"{record['step_s']:.1f} s"
    )
