"""`learner.num_train_steps: auto`: as many steps as `data.num_epochs` needs, known before anything starts."""

import json
from pathlib import Path

import pytest

from areal_rloo.config import dump_config, load_config
from areal_rloo.errors import ConfigError, UserError
from areal_rloo.launcher.epochs import with_steps
from areal_rloo.launcher.start import parse

AUTO = ["learner.num_train_steps=auto", "data.num_epochs=3", "learner.groups_per_step=4", "learner.num_minibatches=1"]


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}", "answer": f"#### {n}"}) + "\n" for n in range(10)))
    return f"data.train={{task: gsm8k, path: {path}}}"


def test_auto_becomes_the_steps_of_all_epochs(source: str) -> None:
    options = parse("local", ["--config", "quickstart.yaml", *AUTO, source])
    assert options.config.learner.num_train_steps == 8  # 3 epochs of 10 prompts, 4 in a step
    assert "num_train_steps: 8\n" in dump_config(options.config)


def test_a_mixture_counts_the_prompts_of_all_sources(tmp_path: Path, source: str) -> None:
    other = "{task: arithmetic, num_prompts: 7}"
    both = f"data.train=[{source.removeprefix('data.train=')}, {other}]"
    assert with_steps(load_config("quickstart.yaml", [*AUTO, both])).learner.num_train_steps == 13  # 51 / 4


def test_a_number_stays_whatever_the_epochs(source: str) -> None:
    config = load_config("quickstart.yaml", ["data.num_epochs=3", source])
    assert with_steps(config) is config


def test_auto_without_epochs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.num_train_steps: expected a number without data\.num_epochs"):
        load_config("quickstart.yaml", ["learner.num_train_steps=auto"])


def test_auto_is_written_as_a_word() -> None:
    assert "num_train_steps: auto\n" in dump_config(load_config("quickstart.yaml", AUTO))


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    absent = f"data.train={{task: gsm8k, path: {tmp_path / 'absent.jsonl'}}}"
    with pytest.raises(UserError, match=r"absent\.jsonl"):
        parse("local", ["--config", "quickstart.yaml", *AUTO, absent])
