"""The command `areal-rloo`, also `python -m areal_rloo`: the name of a program and arguments in, an exit code out.

Every program is a module with `main(arguments)`, imported when asked for: most need no torch.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from areal_rloo import __version__
from areal_rloo.errors import ConfigError, shown
from areal_rloo.program import begin_imports, end_on_interrupt, run_main


class Program(NamedTuple):
    """A module with `main(arguments)`, and words for the list of programs."""

    module: str
    words: str


PROGRAMS = {
    "quickstart": Program("areal_rloo.launcher.quickstart", "train a tiny model to add, on any machine"),
    "run": Program("areal_rloo.launcher.run", "train with a config, here or with --launcher slurm or ray"),
    "resume": Program("areal_rloo.launcher.resume", "go on with a run from the newest checkpoint"),
    "sweep": Program("areal_rloo.launcher.sweep", "train with each combination of several values, one report over all"),
    "doctor": Program("areal_rloo.launcher.doctor.__main__", "find what would end or slow down a run, with fixes"),
    "scale": Program("areal_rloo.launcher.scale", "change the number of rollout workers of a running run"),
    "advise": Program("areal_rloo.launcher.advise", "how to split devices, from the speeds of a run"),
    "config": Program("areal_rloo.config.__main__", "show options, compare configs, write the JSON schema"),
    "migrate": Program("areal_rloo.migrate.__main__", "translate a config or script of AReaL, verl, TRL or ms-swift"),
    "top": Program("areal_rloo.top.__main__", "follow a run on the terminal"),
    "inspect": Program("areal_rloo.inspect.__main__", "show and search the trajectories of a run"),
    "report": Program("areal_rloo.report.__main__", "draw a run, or compare runs, as an HTML page"),
    "replay": Program("areal_rloo.replay.__main__", "repeat recorded train steps"),
    "evaluate": Program("areal_rloo.stages.evaluate", "measure a model on evaluation sets: pass@k, maj@k, intervals"),
    "generate": Program("areal_rloo.stages.generate", "write samples with logprobs and rewards to a file"),
    "sft": Program("areal_rloo.stages.sft", "train a model on demonstrations, or on samples of a teacher"),
    "offline": Program("areal_rloo.stages.offline", "train on saved samples, without workers, for debugging"),
    "export": Program("areal_rloo.stages.export", "copy the model of a checkpoint, with a model card"),
    "completion": Program("areal_rloo.completion", "print the completion script of a shell"),
}
_EXAMPLES = """
examples:
  areal-rloo quickstart
  areal-rloo run --config gsm8k_rloo.yaml launcher.memory_per_gpu=48GB --dry-run
  areal-rloo run --launcher slurm --config gsm8k_rloo.yaml launcher.num_hosts=4 launcher.gpus_per_host=8
  areal-rloo resume runs/latest
  areal-rloo config show algorithm.max_staleness
  eval "$(areal-rloo completion bash)"

`areal-rloo PROGRAM --help` lists the arguments of a program."""


def main(arguments: Sequence[str]) -> int:
    """Run the program that the first argument names; return the exit code of the program."""
    name, *rest = arguments or ("--help",)
    if name not in PROGRAMS:
        return run_main(_other, [name])
    end_on_interrupt()  # until the program has been imported
    begin_imports()
    return run_main(importlib.import_module(PROGRAMS[name].module).main, rest)


def _other(arguments: Sequence[str]) -> int:
    """Print the help or the version.

    Raises:
        ConfigError: there is no such program.
    """
    (name,) = arguments
    if name in ("--help", "-h", "help", "--version"):
        print(__version__ if name == "--version" else help_text())  # noqa: T201 - the face of the program
        return 0
    close = difflib.get_close_matches(name, PROGRAMS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"expected one of {', '.join(PROGRAMS)}"
    raise ConfigError(f"'{shown(name)}': no such program; {hint}")


def help_text() -> str:
    """Return the list of programs, with examples."""
    width = max(map(len, PROGRAMS))
    lines = (f"  {name:<{width}}  {program.words}" for name, program in PROGRAMS.items())
    return "\n".join(("usage: areal-rloo PROGRAM [arguments]\n\nprograms:", *lines, _EXAMPLES))


def script() -> NoReturn:
    """Run the console script `areal-rloo`, and exit with the code of the program."""
    code = main(sys.argv[1:])
    from areal_rloo.waiting import exit_despite_threads  # noqa: PLC0415 - only now: asyncio is slow to import

    exit_despite_threads(code)  # of the code of the user


if __name__ == "__main__":
    script()
