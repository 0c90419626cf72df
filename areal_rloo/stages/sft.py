"""`areal-rloo sft --config X.yaml`: train on demonstrations, in this process, by the learner of RL runs.

    data.train ─► prompts and demonstrations as token ids ─► packed rows ─► L = - mean_t log current_t

L is the loss of `kind: reinforce` with the advantage 1 for every token of a demonstration, at temperature 1. The mean
is over the tokens of a minibatch.

On samples of a teacher (`areal-rloo generate`), this is distillation of sequences (arXiv:1606.07947, section 3.2, with
samples in place of a beam search). The gradient estimates that of KL(teacher || policy), whose other term, the entropy
of the teacher, is constant. `teacher_kl` = mean_t (log teacher_t - log current_t) estimates this KL in nats a token.
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
from areal_rloo.stages.training import Data, Numbers, run_to_end
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.tasks.tools import tool_schemas
from areal_rloo.telemetry.logs import run_to_exit_code
from areal_rloo.trajectory import Group, Trajectory

_NUMBERS = (
    *("loss", "trained_tokens", "gradient_norm", "learning_rate", "entropy"),
    *("learner_tokens_per_s", "model_flops_share"),
)
_DESCRIPTION = """\
Train a model on demonstrations: the completions, or the turns of the assistant, of data.train.
A step takes learner.groups_per_step examples. data.eval are held-out examples.

examples:
  areal-rloo sft --config gsm8k_rloo.yaml data.num_epochs=3 learner.num_train_steps=auto
  areal-rloo sft --config my.yaml data.train={task: demonstrations, path: chats.jsonl} run.folder=runs/chats
  areal-rloo sft --config my.yaml run.folder=runs/chats --resume"""


def main(arguments: Sequence[str]) -> int:
    """Train, and print a line for each step; the last line is the folder of the model.

    Raises:
        UserError: an argument, the config, the data or the model is wrong.
    """
    options, config = parse(Parser(prog="areal-rloo sft", description=_DESCRIPTION, overrides=True), arguments)
    program = Program(name="sft", learner_config=supervised, load=_load, describe=_described, show=_words)
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
    chat = ChatFormat(model.tokenizer, config.data, tools=tool_schemas(config.rollout.episode))
    train, held_out = load_examples(config, Encoder(config, chat, vocab_size=model.vocab_size))
    for examples in train:
        print(examples.words())  # noqa: T201 - users read this line
    groups = [(trajectory,) for examples in train for trajectory in examples.trajectories]
    names = [source.label for source in config.data.eval_sources]
    sets = {name: examples.trajectories for name, examples in zip(names, held_out, strict=True)}
    return Data([examples.source for examples in train], groups, sets)


def _described(batch: Sequence[Group], numbers: Numbers) -> Numbers:
    record = {name: numbers[name] for name in _NUMBERS}
    if all(_has_logprobs(trajectory) for group in batch for trajectory in group.trajectories):
        record["teacher_kl"] = numbers["behaviour_kl_k1"]
    return record


def _has_logprobs(trajectory: Trajectory) -> bool:
    return bool(trajectory.completion.behaviour_logprobs.any())


def _words(record: Numbers) -> str:
    kl = f", KL to the teacher {record['teacher_kl']:.4f}" if "teacher_kl" in record else ""
    return (
        f"loss {record['loss']:.4f}{kl}, entropy {record['entropy']:.3f}, gradient norm {record['gradient_norm']:.2f}, "
        f"epoch {record['epoch'] + 1}, {record['trained_tokens']:,} tokens learned, "
        f"{record['learner_tokens_per_s']:,.0f} tokens/s"
    )
