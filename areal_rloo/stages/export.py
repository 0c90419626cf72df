"""`areal-rloo export RUN_FOLDER --to FOLDER`: copy the model of a checkpoint, with a model card.

The folder is in Hugging Face format. Its files have the access of any new file; a run folder is closed to other users.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from areal_rloo.config import Config, load_config
from areal_rloo.errors import CheckpointError, PreflightError, first_line
from areal_rloo.files import flush_to_disk, move_into_place, use_umask
from areal_rloo.learner.checkpoint import is_whole
from areal_rloo.program import Parser
from areal_rloo.stages.evaluate import check_empty, words
from areal_rloo.stages.source import checkpoint_of
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import EvalRecord

_OF_RL = ("algorithm", "prompts", "rollout")
_DESCRIPTION = """\
Copy the model of a checkpoint into a new folder in Hugging Face format, with a model card.

examples:
  areal-rloo export runs/latest --to my-model
  areal-rloo export runs/latest --step 50 --to my-model --push me/my-model"""


def main(arguments: Sequence[str]) -> int:
    """Export, and print the folder.

    Raises:
        UserError: there is no such run or checkpoint, the checkpoint is damaged, or the folder cannot be written.
    """
    parser = Parser(prog="areal-rloo export", description=_DESCRIPTION)
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="such as runs/latest")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="new, or empty")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N; default: the newest")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload to this model of the Hugging Face hub")
    options = parser.parse_args(arguments)
    export(options.run_folder, options.step, options.to)
    print(options.to)  # noqa: T201 - users read this line
    if options.push is not None:
        print(_pushed(options.to, options.push))  # noqa: T201
    return 0


def export(run_folder: Path, step: int | None, target: Path) -> None:
    """Copy the model of a checkpoint to a new folder, all of it or nothing.

    Raises:
        UserError: as `main`.
    """
    run_folder = run_folder.resolve()
    version, checkpoint = checkpoint_of(run_folder, step)
    if not is_whole(checkpoint):
        raise CheckpointError(f"{checkpoint}: a file is missing or damaged; export another step with --step")
    if target.resolve() == Path.cwd():
        raise PreflightError("argument '--to': expected a new folder, got the current one")
    if target.exists():
        check_empty("--to", target)
    config = load_config(str(checkpoint / "config.yaml"))
    supervised = (run_folder / "sft.jsonl").exists()
    records = [record for record in read_records(run_folder / "metrics.jsonl") if isinstance(record, EvalRecord)]
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for path in sorted((checkpoint / "model").iterdir()):
            shutil.copyfile(path, unfinished / path.name)
        lines = card(config, version, records, supervised=supervised)
        (unfinished / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for path in unfinished.iterdir():
            use_umask(path)
            flush_to_disk(path)
        if target.exists():
            target.rmdir()
        move_into_place(unfinished, target)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise PreflightError(
            f"argument '--to': {target} cannot be written: {error.strerror}; choose another"
        ) from error


def card(config: Config, version: int, records: Sequence[EvalRecord], *, supervised: bool = False) -> Iterator[str]:
    """Give the lines of the model card: how the model was trained, and how it did in evaluations.

    Args:
        config: of the checkpoint.
        version: of the checkpoint.
        records: the evaluations of the run; those of later versions are left out.
        supervised: by `areal-rloo sft`, which reads no options of RL.
    """
    algorithm, learner, sampling = config.algorithm, config.learner, config.rollout.sampling
    head: dict[str, object] = {
        "tags": ["areal-rloo", *(["sft"] if supervised else ["reinforcement-learning", algorithm.preset])]
    }
    if config.model.path != "tiny" and not Path(config.model.path).exists():
        head |= {"base_model": config.model.path}
    yield f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n"
    yield f"# {config.run.name}, step {version}\n"
    method = "supervised fine-tuning" if supervised else "reinforcement learning"
    yield f"Trained by {method} with areal_rloo, from `{config.model.path}`.\n"
    yield "| setting | value |\n|---|---|"
    sources = ", ".join(source.hub or source.path or source.task for source in config.data.train_sources)
    rows = {
        "train steps": version,
        "algorithm.preset": algorithm.preset,
        "prompts of a step x group size": f"{learner.groups_per_step} x {algorithm.group_size}",
        "data.train": sources,
        "learner.optimizer.learning_rate": f"{learner.optimizer.learning_rate:g} ({learner.optimizer.schedule})",
        "algorithm.kl.coefficient": f"{algorithm.kl.coefficient:g}",
        "algorithm.max_staleness": algorithm.max_staleness,
        "rollout.sampling": f"temperature {sampling.temperature:g}, at most {sampling.max_new_tokens} tokens",
        "learner.lora": "merged adapters" if learner.lora is not None else "none",
        "model.dtype": config.model.dtype,
        "run.seed": config.run.seed,
    }
    if supervised:
        rows = {name: value for name, value in rows.items() if not name.startswith(_OF_RL)}
        rows["examples of a step"] = learner.groups_per_step
    for name, value in rows.items():
        yield f"| {name} | {value} |"
    measured = [record for record in records if record.policy_version <= version]
    newest = {record.name: record for record in measured}
    if newest:
        yield "\nEvaluations, with intervals of 95 %:\n"
    for record in newest.values():
        first = next(other for other in measured if other.name == record.name)
        yield f"- before training (version {first.policy_version}): {words(first)}"
        if record is not first:
            yield f"- version {record.policy_version}: {words(record)}"


def _pushed(folder: Path, name: str) -> str:
    """Upload a folder to the hub; return the address.

    Raises:
        PreflightError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - slow

    try:
        api = HfApi()
        api.create_repo(name, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder))
    except Exception as error:
        raise PreflightError(
            f"argument '--push': the hub refuses {name}, or cannot be reached: {first_line(error)}; {folder} is "
            "complete; see `hf auth whoami`"
        ) from error
