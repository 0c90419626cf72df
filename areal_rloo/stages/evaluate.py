"""`areal-rloo evaluate RUN_FOLDER`, or `--config X.yaml`: measure a model on the evaluation sets of a config.

    checks ─► engine ─► samples of each set ─► a line and a record for each set, and all trajectories

The folder of the results is a run folder for `areal-rloo inspect`: config.yaml, metrics.jsonl, trajectories.jsonl.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from areal_rloo.config import Config, dump_config
from areal_rloo.errors import ConfigError, PreflightError
from areal_rloo.files import write_atomically
from areal_rloo.intake.eval_sets import eval_sets
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.launcher.start import check
from areal_rloo.learner.recording import RecordMaker
from areal_rloo.program import Parser
from areal_rloo.stages.samples import Wanted, alone, load_model, make_samples, record_of
from areal_rloo.stages.source import parse
from areal_rloo.tasks.chat import Tokenizer
from areal_rloo.telemetry.logs import setup_logs
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.records import EvalRecord
from areal_rloo.telemetry.trajectories import FILE_NAME, TrajectoryFile
from areal_rloo.waiting import run_beside_user_code, stop_at_ctrl_c

_MOST_OF_A_SECOND = 1000  # evaluations with the same default name
_ERRORS = 1.96  # standard errors to either side: 95 % of a normal distribution
_DESCRIPTION = """\
Measure a model on the evaluation sets of a config (data.eval), and keep every sample.

examples:
  areal-rloo evaluate runs/latest
  areal-rloo evaluate runs/latest --step 50 data.eval.num_samples=8 data.eval.temperature=1
  areal-rloo evaluate --config gsm8k_rloo.yaml model.path=Qwen/Qwen2.5-1.5B-Instruct"""


def main(arguments: Sequence[str]) -> int:
    """Evaluate, and print a line for each set.

    Raises:
        UserError: an argument, the config, the model or a set is wrong.
    """
    parser = Parser(prog="areal-rloo evaluate", description=_DESCRIPTION, overrides=True)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: evaluations/<name>-<time>")
    options, source = parse(parser, arguments)
    config = alone(source.config)
    if config.data.eval is None:
        raise ConfigError("data.eval: expected an evaluation set, got null; set data.eval={task: ...}")
    if options.output is not None and options.output.exists():
        check_empty("--output", options.output)
    check(config)
    folder = _own_folder(options.output, f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        write_atomically(folder / "config.yaml", dump_config(config).encode())
    except OSError as error:
        raise PreflightError(f"argument '--output': {folder} cannot be written: {error.strerror}") from error
    setup_logs("evaluate", level=config.telemetry.log_level, file=folder / "logs" / "evaluate.log")
    print(f"model: {config.model.path}")  # noqa: T201 - users read this line
    try:
        run_beside_user_code(_evaluate(config, folder, source.version))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"stopped; the samples so far are in {folder}", file=sys.stderr)  # noqa: T201
        return 130
    print(f"samples: {sys.executable} -m areal_rloo inspect {folder}")  # noqa: T201 - users read this line
    return 0


def check_empty(option: str, folder: Path) -> None:
    """Check the folder of an option, which exists: raise PreflightError unless the folder is empty."""
    if not folder.is_dir() or any(folder.iterdir()):
        raise PreflightError(f"argument '{option}': expected an empty or a new folder, got {folder}")


def _own_folder(wanted: Path | None, name: str) -> Path:
    """Make a folder for this evaluation alone, or take an empty one; another name if the default is taken.

    Raises:
        PreflightError: the wanted folder has files, or the disk refuses.
    """
    for number in range(1, _MOST_OF_A_SECOND + 1):
        folder = wanted or Path("evaluations") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not any(folder.iterdir()):
                (folder / "config.yaml").touch(exist_ok=False)
                return folder
        except FileExistsError:  # a file; or another evaluation, at the same moment
            pass
        except OSError as error:
            raise PreflightError(f"argument '--output': {folder} cannot be written: {error.strerror}") from error
        if wanted is not None:
            check_empty("--output", folder)
    raise PreflightError(f"argument '--output': expected a new folder, got {folder}")


async def _evaluate(config: Config, folder: Path, version: int) -> None:
    model = load_model(config)
    stop_at_ctrl_c()
    tokenize = Tokenizer(model.chat, config.data)
    records = RecordMaker(model.tokenizer)
    with contextlib.closing(MetricsFile(folder / "metrics.jsonl")) as metrics:

        def on_record(record: EvalRecord) -> None:
            with _writing(folder):
                metrics.append(record)
            print(words(record))  # noqa: T201 - users read this line

        evaluation = Evaluation(eval_sets(config, tokenize), on_record)
        evaluation.request(version)
        wanted = [
            Wanted((group_id, index), prompt, evaluation.seed(group_id) + index)
            for group_id, prompt, indices in evaluation.take_waiting()
            for index in indices
        ]
        with contextlib.closing(TrajectoryFile(folder / FILE_NAME)) as trajectories:
            making = make_samples(config, model, folder, wanted, policy_version=version)
            async with contextlib.aclosing(making) as samples:
                async for made in samples:
                    with _writing(folder):
                        trajectories.append(record_of(made, records, version))
                    if made.trajectories:
                        evaluation.finish(made.trajectories)
                    else:
                        evaluation.fail(made.wanted.sample_id, 0)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say in a line that the disk refuses."""
    try:
        yield
    except OSError as error:
        raise PreflightError(f"{folder} cannot be written: {error.strerror}; free some disk") from error


def interval_of(record: EvalRecord) -> tuple[float, float]:
    """Return the interval of 95 % of the accuracy, or of the reward if not every reward is 0 or 1.

    That of Wilson (1927) for a share: it stays between 0 and 1, and has a width if all prompts agree. The number of
    prompts is the one that gives a share the measured standard error, so several samples of a prompt count for little.
    """
    name, mean = record.result
    error = record.reward_error
    if name != "accuracy":
        return mean - _ERRORS * error, mean + _ERRORS * error
    num = mean * (1 - mean) / error**2 if error > 0 and 0 < mean < 1 else record.num_prompts
    square = _ERRORS**2 / num
    centre, half = mean + square / 2, math.sqrt(square * (mean * (1 - mean) + square / 4))
    return max(0.0, (centre - half) / (1 + square)), min(1.0, (centre + half) / (1 + square))


def words(record: EvalRecord) -> str:
    """Say an evaluation in a line: the result with the interval of 95 %, and the shares over several samples."""
    name, number = record.result
    more = [] if name == "accuracy" or math.isnan(record.accuracy) else [f"accuracy {record.accuracy:.3f}"]
    more.append(f"{record.num_prompts:,} prompts")
    if record.num_samples > 1:
        more += [f"{record.num_samples} samples each", f"pass@{record.num_samples} {record.pass_share:.3f}"]
        if not math.isnan(record.majority_share):
            more.append(f"maj@{record.num_samples} {record.majority_share:.3f}")
    more += [f"{record.completion_tokens_mean:.0f} tokens a completion", f"{record.wall_s:.0f} s"]
    if record.num_failed:
        more.append(f"{record.num_failed} samples failed")
    interval = ""
    if not math.isnan(record.reward_error):
        least, most = interval_of(record)
        interval = f" ({least:.3f} to {most:.3f})"
    return f"{record.name}: {name} {number:.3f}{interval}; {', '.join(more)}"
