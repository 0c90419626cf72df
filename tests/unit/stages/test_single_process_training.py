"""Training in one process: the end, Ctrl-C and a resume, a full disk, folders of other programs, saved samples."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.full_disk import disk_of
from support.local_runs import with_last_values

from areal_rloo.__main__ import main
from areal_rloo.config import SourceConfig, load_config
from areal_rloo.errors import EXIT_UNSAVED, DataError
from areal_rloo.launcher.run_folder import choose_folder
from areal_rloo.learner import lock
from areal_rloo.learner.checkpoint_folder import folder_of, list_checkpoints
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.stages import sft
from areal_rloo.stages.export import export
from areal_rloo.tasks.arithmetic import ArithmeticTask

MEASURED = ("learner_tokens_per_s", "model_flops_share", "step_s", "train_step_s", "times_s")
BASE = [
    *("--config", "quickstart.yaml", "data.train={task: demonstrations, path: rows.jsonl}", "data.num_epochs=2"),
    *("data.eval.num_prompts=4", "evaluation.every_n_versions=3", "checkpoint.every_n_steps=3", "checkpoint.keep=9"),
    *("learner.num_train_steps=auto", "learner.groups_per_step=6", "learner.optimizer.learning_rate=1e-3"),
    "learner.num_threads=1",
]


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folders: dict[str, Path]) -> Iterator[None]:
    """Work in a folder with demonstrations of 20 sums and with a model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folders["qwen2"], "model")
    task = ArithmeticTask(SourceConfig(), 0)
    made = [{"prompt": item.text, "completion": task.demonstration(item)} for item in task.items("train")[:20]]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(*words: str) -> int:
    """Run a program in this process, and release the locks, as the end of a process does."""
    try:
        return main([*with_last_values(*words), "model.path=model"])
    finally:
        while lock._HELD_TO_THE_END:
            lock._HELD_TO_THE_END.pop().release()


def records(folder: str, name: str = "sft") -> list[dict[str, Any]]:
    lines = (Path(folder) / f"{name}.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]


def weights(folder: str, version: int) -> dict[str, bytes]:
    """The bytes of model and states in a checkpoint."""
    checkpoint = list_checkpoints(folder_of(Path(folder)))[version]
    return {path.name: path.read_bytes() for path in checkpoint.rglob("*.safetensors")}


def test_a_resume_after_ctrl_c_is_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two passes over 20 examples, 6 a step, are 7 steps; the last has 4."""
    assert run("sft", *BASE, "run.folder=whole") == 0
    assert capfd.readouterr().out.splitlines()[-1] == str(Path("whole/checkpoints/step-000007/model").resolve())
    kept = records("whole")
    assert [record["policy_version"] for record in kept if record["kind"] == "held_out"] == [0, 3, 6, 7]
    assert [record["epoch"] for record in kept if record["kind"] == "step"] == [0, 0, 0, 1, 1, 1, 1]
    assert list(list_checkpoints(folder_of(Path("whole")))) == [1, 3, 6, 7]
    words = sft._words

    def interrupted(record: Any) -> str:
        if record["policy_version"] == 4:
            signal.raise_signal(signal.SIGINT)
        return words(record)

    monkeypatch.setattr(sft, "_words", interrupted)
    assert run("sft", *BASE, "run.folder=stopped") == 130
    assert f"stopped at step 4; go on with --resume run.folder={Path('stopped').resolve()}" in capfd.readouterr().out
    for command in (("top", "stopped", "--once"), ("resume", "stopped"), ("scale", "stopped", "--workers=1")):
        assert main([*command]) == 2  # nothing of these is for a training without workers
        assert "its steps are in sft.jsonl, and areal-rloo sft goes on with --resume" in capfd.readouterr().err
    monkeypatch.setattr(sft, "_words", words)
    shutil.rmtree("stopped/checkpoints/step-000004")  # as if a kill had come before
    assert run("sft", *BASE, "run.folder=stopped", "--resume") == 0
    assert records("stopped") == kept
    assert weights("stopped", 7) == weights("whole", 7)
    assert run("sft", *BASE, "run.folder=stopped", "--resume") == 0
    assert "nothing is left to train" in capfd.readouterr().out


def test_a_full_disk_ends_with_the_checkpoint_before(capfd: pytest.CaptureFixture[str]) -> None:
    with disk_of(100_000):  # less than the model
        assert run("sft", *BASE, "run.folder=full", "data.eval=null") == EXIT_UNSAVED
    said = capfd.readouterr()
    assert said.out.count("step ") == 7
    assert "a checkpoint could not be written (logs): the training goes on" in said.err
    assert said.err.splitlines()[-1].startswith("error: version 7 could not be saved")
    assert run("sft", *BASE, "run.folder=full", "data.eval=null", "--resume") == 0
    assert list(list_checkpoints(folder_of(Path("full")))) == [1, 3, 6, 7]


SHORT = (*BASE, "learner.num_train_steps=1", "data.eval=null")
TWO_SAMPLES = (
    "learner.num_threads=1",
    "learner.num_train_steps=2",
    "learner.groups_per_step=2",
    "algorithm.group_size=2",
)


def _saved() -> None:
    """Write samples of three prompts: two samples each but the last, in the order of their ends; one failed."""
    tokenizer, rows = make_tiny_tokenizer(), []
    for item, index, text, reward in ((0, 0, "5", 1), (1, 0, "7", 0), (0, 1, "6", 0), (1, 1, "8", 1), (2, 0, "9", 1)):
        ids = tokenizer.encode(text)
        made = {"source": "sums", "item_index": item, "sample_index": index, "prompt_token_ids": [20, 30 + item]}
        rows.append({**made, "completion": text, "token_ids": ids, "logprobs": [-5.0], "spans": [], "reward": reward})
    rows.append({**rows[0], "item_index": 2, "sample_index": 1, "reward": None, "failure": "reward_error"})
    Path("samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_saved_samples_train_by_the_algorithm_of_the_config(capfd: pytest.CaptureFixture[str]) -> None:
    """Two starts are equal; a group of one is left out, and leave-one-out advantages are +1 and -1."""
    _saved()
    for folder in ("one", "two"):
        words = ["samples.jsonl", "--config", "quickstart.yaml", *TWO_SAMPLES, f"run.folder={folder}"]
        assert run("offline", *words) == 0
    out = capfd.readouterr().out
    assert "samples.jsonl: 5 samples, 1 failed ones left out; 2 groups, 1 smaller than 2 left out" in out
    first, second = records("one", "offline")
    assert (first["reward_mean"], first["advantage_min"], first["advantage_max"]) == (0.5, -1.0, 1.0)
    assert (first["trained_tokens"], first["staleness_max"], second["staleness_max"]) == (4, 0, 0)
    assert records("one", "offline") == records("two", "offline")
    assert weights("one", 2) == weights("two", 2)
    few = [*TWO_SAMPLES, "algorithm.group_size=8", "run.folder=three"]
    Path("samples.jsonl").write_text(Path("samples.jsonl").read_text().splitlines()[0])
    assert run("offline", "samples.jsonl", "--config", "quickstart.yaml", *few) == 2
    assert "no prompt has 2 samples" in capfd.readouterr().err
    assert not Path("three").exists()


def test_a_folder_is_resumed_only_by_its_own_program(capfd: pytest.CaptureFixture[str]) -> None:
    _saved()
    assert run("sft", *SHORT, "run.folder=sft") == 0
    refusals = {
        ("sft", *SHORT, "run.folder=sft"): "holds a run already; add --resume",
        ("sft", *SHORT, "--resume"): "expected the folder of an earlier `areal-rloo sft` in run.folder, got null",
        ("offline", "samples.jsonl", *SHORT, "run.folder=sft", "--resume"): "an earlier `areal-rloo offline`",
    }
    for words, expected in refusals.items():
        assert run(*words) == 2
        assert expected in capfd.readouterr().err
    config = load_config("quickstart.yaml", [*with_last_values(*SHORT[2:]), "run.folder=sft", "model.path=model"])
    with pytest.raises(DataError, match="made with demonstrations of demonstrations"):  # an RL run
        choose_folder(config, resume=True)


def test_other_completions_are_noticed_on_a_resume(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("sft", *SHORT, "run.folder=sft") == 0
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text().replace("#### 1", "#### 2"))
    assert run("sft", *SHORT, "run.folder=sft", "--resume", "learner.num_train_steps=2") == 2
    assert "data.train: the checkpoint was made with demonstrations of" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["learner.num_ranks=2"], "learner.num_ranks: expected 1 or auto, because this program is a single process"),
        (["learner.offload=parameters"], "learner.offload: expected none or optimizer"),
        (["fast"], "argument 'fast': expected key.path=value"),
        (["data.train={task: rows, path: rows.jsonl}"], "for areal-rloo sft, take the task demonstrations"),
        (["data.train={task: demonstrations, path: absent.jsonl}"], "absent.jsonl"),
        (["data.train.task=gsm8k"], "expected text in the field 'question'"),
    ],
)
def test_a_wrong_start_is_a_line_and_leaves_nothing(
    words: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("sft", *SHORT, *words, "run.folder=new/one") == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ")
    assert expected in said
    assert said.count("\n") == 1
    assert not Path("new").exists()


def test_the_card_of_an_export_says_how_the_model_was_trained() -> None:
    assert run("sft", *SHORT, "run.folder=sft") == 0
    export(Path("sft"), None, Path("out"))
    card = (Path("out") / "README.md").read_text()
    assert "Trained by supervised fine-tuning with areal_rloo" in card
    assert "| examples of a step | 6 |" in card
    assert "rloo |" not in card
