"""Tasks: disjoint splits, rewards, and mistakes in data files and in the tasks of users."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.config import DataConfig, EvalSourceConfig, FewShotConfig, SourceConfig
from areal_rloo.errors import DataError
from areal_rloo.tasks import check_data, load_eval, load_train, make_task
from areal_rloo.tasks.arithmetic import ArithmeticTask, demonstration, part_of

ROW = {"question": "2 and 2?", "answer": "easy\n#### 4"}


@given(st.integers(0, 10**6), st.integers(0, 19_999))
def test_no_train_problem_is_held_out_for_any_seed(seed: int, index: int) -> None:
    item = ArithmeticTask(SourceConfig(), seed).items("train")[index]
    assert part_of(item.text) == "train"


def test_held_out_problems_are_distinct_and_in_no_other_part() -> None:
    task = ArithmeticTask(SourceConfig(), 0)
    held_out, validation = task.items("eval"), task.validation_items()
    assert len({item.text for item in held_out}) == len(held_out) == 2000
    assert {part_of(item.text) for item in held_out} == {"eval"}
    assert {part_of(item.text) for item in validation} == {"validation"}


def test_items_are_a_function_of_the_seed() -> None:
    first, again, other = (ArithmeticTask(SourceConfig(), seed).items("train")[:20] for seed in (1, 1, 2))
    assert first == again != other


def test_clean_demonstrations_are_right_and_noisy_ones_sometimes() -> None:
    task, rng = ArithmeticTask(SourceConfig(), 0), random.Random(0)
    items = task.items("train")[:200]
    assert all(task.reward(demonstration(i, rng, error_rate=0.0), i) == 1.0 for i in items)
    noisy = sum(task.reward(demonstration(i, rng, error_rate=0.1), i) for i in items) / len(items)
    assert 0.3 < noisy < 0.8


def test_completions_have_a_long_tail() -> None:
    task, rng = ArithmeticTask(SourceConfig(), 0), random.Random(0)
    lengths = [len(demonstration(item, rng, error_rate=0.0)) for item in task.items("train")[:200]]
    lengths.sort()
    assert lengths[-1] > 1.5 * lengths[len(lengths) // 2]
    assert lengths[-1] > 3 * lengths[0]


def test_jsonl_json_csv_and_parquet_are_read_alike(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(ROW) + "\n\n" + json.dumps(ROW) + "\n")
    (tmp_path / "a.json").write_text(json.dumps([ROW, ROW]))
    (tmp_path / "a.csv").write_text('question,answer\n2 and 2?,"easy\n#### 4"\n2 and 2?,"easy\n#### 4"\n')
    pq.write_table(pa.Table.from_pylist([ROW, ROW]), tmp_path / "a.parquet")
    kinds = ("jsonl", "json", "csv", "parquet")
    items = [
        make_task("data.train", SourceConfig(task="gsm8k", path=str(tmp_path / f"a.{kind}")), seed=0).items("train")
        for kind in kinds
    ]
    assert items[0] == items[1] == items[2] == items[3]
    assert len(items[0]) == 2


def test_fields_maps_names_of_the_task_to_names_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "2 and 2?", "solution": "easy\n#### 4"}))
    source = SourceConfig(task="gsm8k", path=str(tmp_path / "a.jsonl"), fields={"question": "q", "answer": "solution"})
    (item,) = make_task("data.train", source, seed=0).items("train")
    assert item.text.startswith("2 and 2?")
    wrong = SourceConfig(task="gsm8k", path=str(tmp_path / "a.jsonl"), fields={"question": "query"})
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: expected a field 'query' \(for question\), got the fields q, sol"
    ):
        make_task("data.train", wrong, seed=0).items("train")


def test_a_broken_file_is_refused_with_name_and_line(tmp_path: Path) -> None:
    good = json.dumps(ROW).encode() + b"\n"
    for name, content, words in (
        ("a.jsonl", good + b'{"question": "\xff"}', r"a\.jsonl:2: not UTF-8: invalid start byte at byte 14"),
        ("a.jsonl", good + b"x" * (65 * 2**20), r"a\.jsonl:2: a line of more than 67108864 bytes"),
        ("a.jsonl", b"\n\n", r"a\.jsonl: no row in it"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not valid JSON"),
        ("a.json", b"{}", r"a\.json: expected an array of objects, got dict"),
        ("a.json", b"[1]", r"a\.json: row 1: expected an object, got int"),
        ("a.json", b"[", r"a\.json: not valid JSON"),
        ("a.csv", b"question,answer\n1\n", r"a\.csv:2: expected 2 columns as in the first line"),
        ("a.csv", b"question,answer\n1,2,3\n", r"a\.csv:2: expected 2 columns as in the first line"),
        ("a.csv", b'question,answer\n"1,2\n', r"a\.csv:2: not valid CSV"),
        ("a.parquet", b"no", r"a\.parquet: cannot be read"),
        ("a.txt", b"no", r"expected a \.jsonl, \.json, \.csv, \.parquet file, got '\.txt'"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=words):
            make_task("data.train", SourceConfig(task="gsm8k", path=str(tmp_path / name)), seed=0).items("train")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "a.jsonl:1: not valid JSON: Expecting property name enclosed in double quotes at column 2$"),
        ('\n{"question": \n', "a.jsonl:2: not valid JSON: Expecting value at column 13$"),
        ("[1]", "a.jsonl:1: expected an object"),
        ('{"question": "x"}', "a.jsonl:1: expected text in the field 'answer', got the fields question"),
        ('{"question": "x", "answer": true}', "a.jsonl:1: expected text in the field 'answer', got bool"),
        ('{"question": "x", "answer": "four"}', "a.jsonl:1: expected an 'answer' ending in '#### number', or a number"),
        ('{"question": "x", "answer": "4 or 5"}', "a.jsonl:1: expected an 'answer' ending in '#### number', or a numb"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match=words.replace("[", r"\[")):
        make_task("data.train", SourceConfig(task="gsm8k", path=str(tmp_path / "a.jsonl")), seed=0).items("train")


def test_an_unknown_task_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'arithmetic'"):
        make_task("data.train", SourceConfig(task="arithmetics"), seed=0)
    with pytest.raises(DataError, match=r"nowhere\.jsonl: no such file"):
        check_data(DataConfig(train=SourceConfig(task="gsm8k", path="nowhere.jsonl"), eval=None))
    with pytest.raises(DataError, match=rf"data\.train\.path: {tmp_path}: expected a file, got a folder"):
        check_data(DataConfig(train=SourceConfig(task="gsm8k", path=str(tmp_path)), eval=None))


def test_evaluation_without_a_path_uses_the_test_file_beside_train(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW))
    data = DataConfig(
        train=SourceConfig(task="gsm8k", path=str(tmp_path / "train.jsonl")), eval=EvalSourceConfig(task="gsm8k")
    )
    with pytest.raises(DataError, match=r"data\.eval\.path: expected a file, or .*test\.jsonl beside the train file"):
        load_eval(data, seed=0)
    (tmp_path / "test.jsonl").write_text(json.dumps({**ROW, "question": "held out"}))
    assert load_eval(data, seed=0)[0].items[0].text.startswith("held out")


MISTAKES = """
import random
from areal_rloo.tasks import Item, Task

class Lazy:
    def __len__(self): return 100
    def __getitem__(self, index): return [][index]

ITEMS = {
    "error": lambda: {}["question"],
    "generator": lambda: (Item(str(n)) for n in range(3)),
    "no items": lambda: [],
    "rows": lambda: [Item("p"), {"prompt": "q"}],
    "numbers": lambda: [Item(3)],
    "lazy": Lazy,
    "answers": lambda: [Item("p", 3)],
    "random": lambda: [Item(str(random.random())) for n in range(9)],
    "empty": lambda: [Item("p"), Item("")],
    "good": lambda: [Item(str(n)) for n in range(9)],
}

class Mine(Task):
    def __init__(self, source, seed): self.kind = source.parameters["kind"]
    def items(self, split): return ITEMS[self.kind]()
    def reward(self, completion, item): return 1.0
    def demonstration(self, item): return {}["solution"]
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("error", "the items cannot be made: KeyError: 'question' ({file}:10)"),
        ("generator", "expected a list of items, or another sequence, from {file}:Mine.items('train'), got generator"),
        ("no items", "expected items from {file}:Mine.items('train'), got none"),
        ("rows", "item 2: expected an areal_rloo.tasks.Item, got dict"),
        ("numbers", "item 1: expected a text or messages as the prompt: TypeError: 'int' object is not iterable"),
        ("lazy", "item 1 cannot be made: IndexError: list index out of range ({file}:7)"),
        ("answers", "item 1: expected a text as the answer, got int"),
        ("empty", "item 2: expected a prompt, got an empty text"),
    ],
)
@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_mistake_in_the_items_of_a_custom_task_is_a_data_error(
    tmp_path: Path, kind: str, words: str, deduplicate: bool
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MISTAKES)
    source = SourceConfig(task=f"{file}:Mine", parameters={"kind": kind})
    data = DataConfig(train=source, eval=None, deduplicate=deduplicate)
    for look in (lambda: check_data(data), lambda: [list(loaded.items) for loaded in load_train(data, seed=0)]):
        with pytest.raises(DataError) as caught:
            look()
        assert str(caught.value) == f"data.train: {words.format(file=file)}"


def test_other_items_at_every_call_are_a_data_error(tmp_path: Path) -> None:
    """Else no learner could restart: the checkpoint was made with other prompts."""
    file = tmp_path / "mine.py"
    file.write_text(MISTAKES)
    data = DataConfig(train=SourceConfig(task=f"{file}:Mine", parameters={"kind": "random"}), eval=None)
    with pytest.raises(
        DataError, match=r"^data\.train: expected the same items from every call of .*mine.py:Mine.items"
    ):
        check_data(data)


def test_a_custom_reward_with_other_parameters_is_a_data_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MISTAKES.replace("def reward(self, completion, item)", "def reward(self, completion)"))
    source = SourceConfig(task=f"{file}:Mine", parameters={"kind": "good"})
    with pytest.raises(
        DataError,
        match=r"^data\.train\.task: expected .*:Mine.reward\(self, completion, item\), but it cannot be called",
    ):
        make_task("data.train", source, seed=0)


def test_a_mistake_in_a_custom_demonstration_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MISTAKES)
    source = SourceConfig(task=f"{tmp_path / 'mine.py'}:Mine", parameters={"kind": "good"}, few_shot=FewShotConfig())
    with pytest.raises(
        DataError, match=r"^data\.train\.few_shot: a demonstration cannot be made: KeyError: 'solution' .*mine\.py:"
    ):
        load_train(DataConfig(train=source, eval=None), seed=0)
