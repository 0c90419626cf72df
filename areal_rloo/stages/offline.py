"""`areal-rloo offline SAMPLES --config X.yaml`: train on samples that `areal-rloo generate` saved, for debugging.

    rows ─► groups of the same prompt ─► the train step of an RL run: advantages, loss, optimizer

No worker, no reward and no port: a step is the same in every start, and a debugger can stop anywhere. Rewards and
behaviour logprobs are those of the rows. The tokens count as sampled by the learner's present version, staleness 0:
the rows' versions belong to another history. So `behaviour_weight` alone corrects for the distance to their policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_rloo.config import Config
from areal_rloo.errors import DataError
from areal_rloo.program import Parser
from areal_rloo.stages.begin import Model, Program, begin, parse
from areal_rloo.stages.saved_samples import check_tokenizer, read_sample, trajectory_of
from areal_rloo.stages.training import Data, Numbers, run_to_end, source_of
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.tasks.rows import rows_of_file
from areal_rloo.telemetry.logs import run_to_exit_code
from areal_rloo.trajectory import Trajectory, longest_row

_CHECKED = 8  # samples whose tokens are compared with their text
_DESCRIPTION = """\
Train on samples that `areal-rloo generate` wrote, with the algorithm of a config: no workers, for debugging.
A step takes learner.groups_per_step prompts with all of their samples.

examples:
  areal-rloo generate --config quickstart.yaml --num-prompts 500 --output samples.jsonl
  areal-rloo offline samples.jsonl --config quickstart.yaml learner.num_train_steps=10
  python -m pdb -m areal_rloo offline samples.jsonl --config quickstart.yaml algorithm.preset=grpo"""


def main(arguments: Sequence[str]) -> int:
    """Train, and print a line for each step; the last line is the folder of the model.

    Raises:
        UserError: an argument, the config, the samples or the model is wrong.
    """
    parser = Parser(prog="areal-rloo offline", description=_DESCRIPTION, overrides=True)
    parser.add_argument("samples", metavar="SAMPLES", help="a .jsonl or .parquet of areal-rloo generate")
    options, config = parse(parser, arguments)

    def load(config: Config, model: Model) -> Data:
        return load_samples(options.samples, config, model)

    program = Program(name="offline", learner_config=lambda config: config, load=load, show=_words)
    return run_to_exit_code(lambda: run_to_end(begin(program, config, resume=options.resume)))


def load_samples(path: str, config: Config, model: Model) -> Data:
    """Read the samples, grouped by prompt in the order of the first sample; failed samples are left out.

    Raises:
        DataError: a row is wrong, a sample is longer than a row of the learner, or no group is large enough.
    """
    groups: dict[tuple[str, int], list[Trajectory]] = {}
    chat, num_read, num_failed = ChatFormat(model.tokenizer, config.data), 0, 0
    for where, row in rows_of_file(path, {}):
        if row.get("failure") is not None:
            num_failed += 1
            continue
        sample = read_sample(row, where, vocab_size=model.vocab_size)
        if num_read < _CHECKED:
            check_tokenizer(sample, where, chat)
        num_read += 1
        trajectory = trajectory_of(sample)
        if (num := longest_row([trajectory])) > config.trajectory_tokens:
            raise DataError(
                f"{where}: expected at most {config.trajectory_tokens} tokens, data.max_prompt_tokens + "
                f"rollout.sampling.max_new_tokens, got {num}; raise them"
            )
        groups.setdefault((sample.source, sample.item_index), []).append(trajectory)
    least = config.algorithm.least_group
    kept = {key: tuple(group) for key, group in groups.items() if len({t.sample_index for t in group}) >= least}
    if not kept:
        raise DataError(f"{path}: no prompt has {least} samples, as algorithm.group_size and drop_groups_of_one need")
    print(  # noqa: T201 - users read this line
        f"{path}: {num_read:,} samples, {num_failed:,} failed ones left out; {len(kept):,} groups, "
        f"{len(groups) - len(kept):,} smaller than {least} left out"
    )
    groups_kept = list(kept.values())
    return Data([(source_of("saved samples", groups_kept), groups_kept)], {})


def _words(record: Numbers) -> str:
    return (
        f"loss {record['loss']:.4f}, reward {record['reward_mean']:.3f}, entropy {record['entropy']:.3f}, epoch "
        f"{record['epoch'] + 1}, {record['trained_tokens']:,} tokens trained, {record['step_s']:.1f} s"
    )
