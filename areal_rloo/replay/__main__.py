"""The command: a run folder and steps in, a line for each repeated step out.

Exit codes: 0 all steps are equal, or options were changed; 1 a step differs; 2 a mistake of the user.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from areal_rloo.errors import DataError
from areal_rloo.learner.batches import software
from areal_rloo.program import Parser, run_main
from areal_rloo.replay.recording import Part, Recording, changed_starts, find_part, read_recording, spans
from areal_rloo.replay.steps import Numbers, Repeated, build_train_step, load_start_config, repeat
from areal_rloo.telemetry.logs import run_to_exit_code, setup_logs

_SHOWN = 3  # numbers that differ, in the line of a step
_EXAMPLES = """
the loss jumps at step 412:
  areal-rloo replay runs/latest --list
  areal-rloo replay runs/latest --from 411 --to 412
  areal-rloo replay runs/latest --from 411 --to 412 --set algorithm.loss.behaviour_weight.upper=2
  python -m pdb -m areal_rloo replay runs/latest --from 411 --to 412
"""


class Arguments(argparse.Namespace):
    """The command line."""

    run_folder: Path
    version: int
    last: int | None
    overrides: list[str]
    model: str | None
    device: str | None
    list: bool


def main(words: Sequence[str]) -> int:
    """Run the command; a mistake of the user gives a single line and exit code 2."""
    setup_logs("replay", level="error", file=None)
    return run_to_exit_code(lambda: _replay(parse_arguments(words)))


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Parse the command line; raises DataError for a mistake."""
    return _parser().parse_args(words, namespace=Arguments())


def _replay(arguments: Arguments) -> int:
    recording = read_recording(arguments.run_folder)
    if arguments.list:
        _list(recording)
        return 0
    part = find_part(recording, arguments.version, arguments.last)
    changed = list(arguments.overrides)
    if arguments.device not in (None, part.start.device):
        changed.append(f"--device {arguments.device}")
    device = arguments.device or part.start.device
    config = load_start_config(part.start, arguments.overrides)
    _say_or_refuse_changes(recording, part, changed)
    model_path = arguments.model or part.start.model_path
    train_step = build_train_step(part, config, model_path=model_path, device=device)
    _say_conditions(part, device, changed)
    num_compared = num_different = 0
    _say(f"{'step':>8}  {'loss, recorded':>24}  {'loss, replayed':>24}")
    for repeated in repeat(train_step, recording, part.steps):
        _say(_line(repeated))
        num_compared += repeated.recorded is not None
        num_different += bool(repeated.different)
    _say(
        f"{len(part.steps)} steps, {num_compared} with a record in metrics.jsonl: "
        f"{num_compared - num_different} equal to the bit, {num_different} different"
    )
    return 1 if num_different and not changed else 0


def _say_or_refuse_changes(recording: Recording, part: Part, changed: Sequence[str]) -> None:
    """Refuse a part in which a resumed learner decided otherwise; with changed options only say so."""
    for version, differences in changed_starts(recording, part):
        text = f"the run was resumed at version {version} with other values of {differences}"
        if not changed:
            raise DataError(f"{text}; end with --to {version}, or begin with --from {version}")
        _say(f"note: {text}; the replay keeps the values of version {part.start.policy_version}")


def _say_conditions(part: Part, device: str, changed: Sequence[str]) -> None:
    start, here = part.start, software(device)
    beginning = "the initial model" if part.checkpoint is None else str(part.checkpoint)
    _say(f"from {beginning}: steps {part.steps[0]} to {part.steps[-1]}, on {device}, torch threads {start.num_threads}")
    if changed:
        _say(f"note: changed: {', '.join(changed)}; the numbers may differ")
    different = [f"{name} {start.software.get(name)}, not {own}" for name, own in here.items()]
    different = [text for text, name in zip(different, here, strict=True) if start.software.get(name) != here[name]]
    if different:
        _say(f"note: recorded with {'; '.join(different)}; the last bits may differ")
    if device.startswith("cuda"):
        _say("note: GPU kernels may add in another order in each run; the last bits may differ")


def _line(repeated: Repeated) -> str:
    recorded, replayed, different = repeated.recorded, repeated.replayed, repeated.different
    if replayed is None:
        result = "not finite: refused" if recorded is None else "not finite: the replay refuses all batches of the step"
    elif recorded is None:
        result = "no record in metrics.jsonl"
    elif not different:
        result = f"equal, all {len(replayed)} numbers"
    else:
        result = f"different: {_described(different, recorded, replayed)}"
    return f"{repeated.step:>8}  {_loss(recorded):>24}  {_loss(replayed):>24}  {result}"


def _described(different: Sequence[str], recorded: Numbers, replayed: Numbers) -> str:
    """Describe the first different numbers, the loss first, and count the others."""
    names = sorted(different, key=lambda name: name != "loss")
    shown = [_change(name, recorded.get(name), replayed.get(name)) for name in names[:_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "")


def _change(name: str, before: object, after: object) -> str:
    if isinstance(before, float) and isinstance(after, float):
        return f"{name} {after - before:+.3g}"
    return name


def _loss(numbers: Numbers | None) -> str:
    return "-" if numbers is None else repr(float(numbers["loss"]))


def _list(recording: Recording) -> None:
    """Print the recorded steps, the checkpoints and the starts."""
    num_bytes = sum(path.stat().st_size for paths in recording.batches.values() for path in paths)
    _say(f"steps with batches: {spans(recording.batches)} ({num_bytes:,} bytes)")
    _say(f"steps with numbers in metrics.jsonl: {spans(recording.records) or 'none'}")
    _say(f"checkpoints of versions: {spans(recording.checkpoints) or 'none'}")
    for version, start in recording.starts.items():
        machine = ", ".join(f"{name} {value}" for name, value in start.software.items())
        _say(f"started at version {version}: {start.model_path}, torch threads {start.num_threads}, {machine}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()  # a step may take minutes


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise DataError(f"{message}; expected RUN_FOLDER and then options, which --help lists")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="areal-rloo replay",
        description="Run train steps of a run with wire.record=true again, without workers, and compare the numbers.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="such as runs/latest; stays as it is")
    parser.add_argument(
        "--from",
        dest="version",
        type=int,
        default=0,
        metavar="N",
        help="begin with the newest checkpoint at or below version N, the state after step N; 0: the initial model",
    )
    parser.add_argument(
        "--to", dest="last", type=int, metavar="N", help="the last step; default: the last with a batch"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change an option of the run, to see the effect; differences then give exit code 0; repeatable",
    )
    parser.add_argument("--model", metavar="PATH", help="the initial model, if the folder was moved")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the run's; as --set")
    parser.add_argument("--list", action="store_true", help="print what is recorded, and end")
    return parser


if __name__ == "__main__":
    sys.exit(run_main(main))
