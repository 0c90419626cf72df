"""Every option is described, from the structs alone: key, values, default, meaning, JSON schema."""

import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml

from areal_rloo.config import Config, load_config
from areal_rloo.config.__main__ import differences, main
from areal_rloo.config.load import shipped_configs
from areal_rloo.config.options import Option, find, groups, json_schema
from areal_rloo.config.typed import hints_of
from areal_rloo.errors import ConfigError

OPTIONS = {option.key: option for group in groups() for option in group.options}


class Loader(yaml.SafeLoader):
    """YAML 1.2, as editors read it: 1e-6 is a number."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d+)?[eE][-+]?\d+"), list("0123456789"))
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_every_key_of_the_config_is_an_option() -> None:
    plain = {".".join(part for part in key.split(".") if part not in ("N", "NAME")) for key in OPTIONS}
    sections = {group.key for group in groups()}
    of_structs = {key for key in hints_of(Config) if key not in sections}
    assert of_structs <= plain
    assert len(OPTIONS) > 200


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_an_option_says_its_values_its_default_and_its_meaning(option: Option) -> None:
    assert len(option.meaning) > 10
    assert option.values
    assert option.default
    assert "\n" not in option.default


@pytest.mark.parametrize(
    ("key", "values", "default"),
    [
        ("algorithm.max_staleness", "integer from 0", "2"),
        ("rollout.num_workers", "auto or integer from 1 to 1,024", "1"),
        ("rollout.sampling.top_p", "number above 0 to 1", "1.0"),
        ("launcher.memory_per_gpu", "bytes: 24000000000, 24GB or 24GiB", "0"),
        ("learner.gradient_checkpointing", "true or false or auto", "false"),
        ("learner.optimizer.betas", "list of 2: number from 0, below 1", "[0.9, 0.95]"),
        ("wire.port", "integer from 0 to 65,535", "0"),
        ("rollout.sglang.arguments", "mapping of names to text or integer or number or true or false or null", "{}"),
        ("data.eval.N.temperature", "number from 0", "0.0"),
        ("data.train.N.rewards.N.weight", "number from -1,000,000,000,000.0 to 1,000,000,000,000.0", "1.0"),
        ("learner.lora.rank", "integer from 1", "16"),
        ("run.entry", "text or null", "null"),
    ],
)
def test_values_and_defaults_in_words(key: str, values: str, default: str) -> None:
    assert (OPTIONS[key].values, OPTIONS[key].default) == (values, default)


def test_a_comment_above_and_a_comment_behind_are_meanings() -> None:
    assert OPTIONS["run.seed"].meaning == "of prompts, sampling and initial weights"
    assert OPTIONS["wire.record"].meaning.startswith("Keep each batch in the run folder")
    assert OPTIONS["launcher.slurm.warn_before_s"].meaning.startswith("This long before the limit")


def test_show_prints_a_section_and_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "run"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[::2]] == [
        *("run.name", "run.seed", "run.folder", "run.entry")
    ]
    assert main(["show", "data.train.rewards.0.weight"]) == 0
    assert capsys.readouterr().out.startswith("data.train.rewards.N.weight: ")
    assert [option.key for option in find("algorithm.max_staleness")] == ["algorithm.max_staleness"]
    with pytest.raises(ConfigError, match=r"did you mean 'learner\.optimizer\.learning_rate' or"):
        main(["show", "learner.learning_rate"])


def test_diff_names_each_option_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = load_config("quickstart.yaml"), load_config("quickstart.yaml", ["run.seed=3", "data.eval=null"])
    lines = differences(first, second)
    assert "run.seed: 0 -> 3" in lines
    assert "data.eval: absent -> null" in lines
    assert "data.eval.num_prompts: 200 -> absent" in lines
    assert differences(first, first) == []
    (tmp_path / "config.yaml").write_text("{}")
    assert main(["diff", "quickstart.yaml", str(tmp_path)]) == 0
    assert 'run.name: "quickstart" -> "run"' in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("path", shipped_configs(), ids=lambda path: path.name)
def test_a_shipped_config_agrees_with_the_schema(path: Path) -> None:
    tree = yaml.load(path.read_text(), Loader)
    assert list(VALIDATOR.iter_errors(tree)) == []


@pytest.mark.parametrize(
    "text",
    [
        *("run: {sead: 1}", "algorithm: {group_size: 0}", "learner: {num_ranks: none}", "rollout: {engine: tgi}"),
        *("data: {train: {hubb: x}}", "learner: {lora: 3}", "launcher: {memory_per_gpu: [1]}"),
    ],
)
def test_the_schema_refuses_what_a_start_refuses(text: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(text)
    assert list(VALIDATOR.iter_errors(yaml.safe_load(text)))
    with pytest.raises(ConfigError):
        load_config(str(tmp_path / "my.yaml"))


def test_the_schema_takes_the_words_of_the_config() -> None:
    tree = {"learner": {"num_ranks": "auto", "microbatch_tokens": 4096}, "launcher": {"memory_per_gpu": "24GB"}}
    assert list(VALIDATOR.iter_errors(tree)) == []
    described = json_schema()["$defs"]["LearnerConfig"]["properties"]["num_train_steps"]
    assert described["description"] == "length of the run; auto: the steps of data.num_epochs"
    assert described["default"] == 100


def test_the_shipped_schema_is_current() -> None:
    shipped = shipped_configs()[0].with_name("schema.json")
    assert json.loads(shipped.read_text()) == json.loads(msgspec.json.encode(json_schema()))
    for path in shipped_configs():
        assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n"), path.name
