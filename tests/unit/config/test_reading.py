"""YAML from outside is bounded: depth, number of values, length, aliases; keys are not given twice."""

from pathlib import Path

import pytest
from support.configs_to_load import refusal, write

from areal_rloo.config import load_config
from areal_rloo.config.reading import MOST_BYTES
from areal_rloo.errors import ConfigError

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("run: {seed: 1}\nlearner: {}\nrun: {seed: 2}\n", 3, "the key 'run' is given twice, in line 1 too; leave one"),
        ("run:\n  seed: 1\n  name: a\n  seed: 2\n", 4, "the key 'run.seed' is given twice, in line 2 too"),
        ("data:\n  train:\n  - {task: rows,\n     task: math}\n", 4, "the key 'data.train.0.task' is given twice"),
        ("run:\n  seed: !!int abc\n", 2, "expected no tag, got tag:yaml.org,2002:int; put text in quotes"),
        (
            "run: !!python/object/apply:os.system [ls]\n",
            1,
            "expected no tag, got tag:yaml.org,2002:python/object/apply",
        ),
        ("run: &a\n  name: x\nlearner:\n  <<: *a\n", 4, "the merge key '<<' is not read here; write the keys out"),
        ("run: &a [*a]\n", 1, "the alias '*a' names no anchor that ends before it"),
        ("run: *nowhere\n", 1, "the alias '*nowhere' names no anchor"),
        ("run:\n  {[1]: 2}\n", 2, "expected a plain name as the key of a value"),
        (f"run:\n  {'k' * 101}: 2\n", 2, "expected a key of at most 100 characters, got kkk"),
        ("run: {}\n---\nrun: {}\n", 2, "expected a single document"),
        ('run:\n  name: "a\\e[2Jb"\n', 2, "expected no control characters in a text, got '\\x1b'"),
        ('run:\n  name: "\\ud800"\n', 2, "expected no control characters in a text, got '\\ud800'"),
        ("run: {seed: 1\n" + "[" * 5000, 2, "not valid YAML"),
        ("run: " + "[" * 5000, 1, "expected at most 32 levels"),
        ("\n".join(" " * depth + "a:" for depth in range(50)), 34, "expected at most 32 levels"),
        ("run: [" + "1, " * 10_001 + "]", 1, "expected at most 10000 values, aliases written out"),
        (BOMB, 5, "expected at most 10000 values, aliases written out"),
        ("a: &a " + "x" * 30_000 + "\nb: [*a, *a,\n *a, *a]", 3, "expected at most 100000 characters of text"),
    ],
)
def test_a_text_outside_the_limits_is_refused_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    name = write(tmp_path, text)
    message = refusal(name)
    assert message.startswith(f"{name}:{line}: {words}"), message


@pytest.mark.parametrize("text", ["run: \0", "run: \x1b[1m", 'run: "\\U00110000"', f"%YAML 1.{'1' * 5000}\n---\nrun:"])
def test_bytes_and_escapes_that_are_no_text_are_refused(tmp_path: Path, text: str) -> None:
    name = write(tmp_path, text)
    message = refusal(name)
    assert message.startswith(name)
    assert "not valid YAML: " in message


def test_a_file_that_is_too_large_is_not_read_to_the_end(tmp_path: Path) -> None:
    name = write(tmp_path, "# a comment\n" * MOST_BYTES)
    assert (
        refusal(name) == f"{name}: expected a config of at most {MOST_BYTES} bytes, got more; is this the right file?"
    )


def test_overrides_are_bounded_together_with_the_file() -> None:
    long = [f"data.train.parameters.a{index}={'x' * 6000}" for index in range(9)]
    assert "too large with all overrides: expected at most 5000 values" in refusal("quickstart.yaml", *long)
    deep = "data.train.parameters.a.b.c.d.e.f.g.h.i=[[[[[[1]]]]]]"
    assert "too large with all overrides: expected at most 16 levels" in refusal("quickstart.yaml", deep)
    assert "at most 16 names" in refusal("quickstart.yaml", f"{'a.' * 17}a=1")
    assert "at most 100 characters before the '='" in refusal("quickstart.yaml", f"{'a' * 101}=1")


def test_an_alias_gives_a_copy_that_an_override_changes_alone(tmp_path: Path) -> None:
    name = write(tmp_path, "data: {train: &a {task: math, path: a.jsonl}, eval: *a}")
    data = load_config(name, ["data.eval.path=b.jsonl"]).data
    assert [source.path for source in (*data.train_sources, *data.eval_sources)] == ["a.jsonl", "b.jsonl"]


def test_a_mistake_names_the_line_of_the_nearest_key(tmp_path: Path) -> None:
    name = write(tmp_path, "run:\n  seed: 1\nlearner:\n  optimizer:\n    betas: [0.9,\n      2]\n")
    assert refusal(name).startswith(f"{name}:5: learner.optimizer.betas.1: expected float < 1.0")
    assert refusal(name, "run.seed=x").startswith("override 'run.seed=x': run.seed: expected int")


def test_a_message_is_a_single_short_line_whatever_is_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "a\nb\x1b[1m"
    folder.mkdir()
    message = refusal(write(folder, "run: {seed: x}"))
    assert message.isprintable()
    assert message.endswith("run.seed: expected int, got str; the value is 'x'")
    assert len(refusal("quickstart.yaml", "run.seed=" + "a\n" * 40_000)) < 1000


def test_a_wrong_item_of_an_override_is_not_blamed_on_the_file() -> None:
    override = "learner.optimizer.betas=[0.9, 1.5]"
    assert refusal("quickstart.yaml", override).startswith(f"override '{override}': learner.optimizer.betas.1: ")


def test_a_folder_as_a_config_names_a_file_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": this is a folder; expected a config file$"):
        load_config(str(tmp_path))
    write(tmp_path, "run: {}")
    with pytest.raises(ConfigError, match=r": this is a folder; expected a config file, such as .*\.yaml$"):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24000000000", 24 * 10**9),
        ("24e9", 24 * 10**9),
        ("24GB", 24 * 10**9),
        ("'24 GB'", 24 * 10**9),
        ("24G", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("0", 0),
    ],
)
def test_a_size_may_be_written_with_a_unit(text: str, expected: int) -> None:
    launcher = load_config("quickstart.yaml", [f"launcher.memory_per_gpu={text}"]).launcher
    assert launcher.memory_per_gpu == expected


@pytest.mark.parametrize("text", ["24 gigs", "GB", "24Gi B", "-1GB", "24XB", "true", "1e99"])
def test_a_size_in_another_form_names_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"launcher\.memory_per_host: expected bytes, as 24000000000, 24GB or 24GiB"):
        load_config("quickstart.yaml", [f"launcher.memory_per_host={text}"])


def test_a_file_that_was_written_in_vain_is_refused(tmp_path: Path) -> None:
    """`areal-rloo migrate typo.py > my.yaml` leaves an empty file, which would train the tiny model on sums."""
    file = tmp_path / "my.yaml"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"my\.yaml: is empty; expected sections"):
        load_config(str(file))
    assert load_config(str(file), ["run.seed=3"]).run.seed == 3
