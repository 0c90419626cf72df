"""Sources of prompts: duplicates, few-shot examples, the hub, puzzles, and own rows."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_rloo.config import DataConfig, EvalSourceConfig, FewShotConfig, RewardConfig, SourceConfig
from areal_rloo.errors import ConfigError, DataError
from areal_rloo.tasks import Item, Message, check_data, load_eval, load_train, make_task
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.tasks.loading import _prepared
from areal_rloo.tasks.sendable import MOST_BYTES

MINE = (RewardConfig(function="math:sqrt"),)


def _rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _sums(path: Path, *texts: str) -> str:
    return _rows(path, *({"question": text, "answer": f"#### {number}"} for number, text in enumerate(texts)))


# Duplicates, few-shot examples, limits


def test_deduplication_removes_repeats_and_prompts_of_evaluation_sets(tmp_path: Path) -> None:
    path = _sums(tmp_path / "train.jsonl", "a b", "c", "a  b", "held", "d")
    other = _sums(tmp_path / "other.jsonl", "d", "e")
    held = _sums(tmp_path / "test.jsonl", "held")
    train = (SourceConfig(task="gsm8k", path=path), SourceConfig(task="gsm8k", path=other, name="other"))
    for deduplicate, texts in (
        (False, [["a b", "c", "a  b", "held", "d"], ["d", "e"]]),
        (True, [["a b", "c", "d"], ["e"]]),
    ):
        data = DataConfig(train=train, eval=EvalSourceConfig(task="gsm8k", path=held), deduplicate=deduplicate)
        sources = load_train(data, seed=0)
        assert [[item.text.partition("\n")[0] for item in source.items] for source in sources] == texts
        assert [source.num_duplicates for source in sources] == ([2, 1] if deduplicate else [0, 0])
        assert [source.items[0].source for source in sources] == ["gsm8k", "other"]


def test_num_prompts_keeps_the_first_prompts(tmp_path: Path) -> None:
    path = _sums(tmp_path / "train.jsonl", "a", "b", "c")
    data = DataConfig(train=SourceConfig(task="gsm8k", path=path, num_prompts=2), eval=EvalSourceConfig(num_prompts=3))
    (source,) = load_train(data, seed=0)
    assert [item.text[0] for item in source.items] == ["a", "b"]
    (held,) = load_eval(data, seed=0)
    assert len(held.items) == 3


def test_deduplication_sees_evaluation_sets_without_examples_and_limits(
    tmp_path: Path,
) -> None:
    train = _sums(tmp_path / "train.jsonl", *(f"q{number}" for number in range(8)))
    held = _sums(tmp_path / "test.jsonl", "x", "q5", "q6", "q7")
    evaluation = EvalSourceConfig(task="gsm8k", path=held, few_shot=FewShotConfig(num=2), num_prompts=1)
    data = DataConfig(train=SourceConfig(task="gsm8k", path=train), eval=evaluation, deduplicate=True)
    (source,) = load_train(data, seed=0)
    assert [item.text[:2] for item in source.items] == ["q0", "q1", "q2", "q3", "q4"]


def test_few_shot_examples_precede_all_prompts_and_are_not_prompts(tmp_path: Path) -> None:
    path = _sums(tmp_path / "train.jsonl", *(f"q{number}" for number in range(6)))
    few_shot = FewShotConfig(num=2)
    train = SourceConfig(task="gsm8k", path=path, few_shot=few_shot)
    _sums(tmp_path / "test.jsonl", "held", "q0")
    data = DataConfig(train=train, eval=EvalSourceConfig(task="gsm8k", few_shot=few_shot))
    (source,) = load_train(data, seed=0)
    assert len(source.items) == 4
    prompts = [item.prompt for item in source.items]
    shown = {prompt[:4] for prompt in prompts}
    assert len(shown) == 1
    user, assistant, other, answer = shown.pop()
    assert isinstance(user, Message) and isinstance(answer, Message)
    assert [user.role, assistant.role, other.role, answer.role] == ["user", "assistant", "user", "assistant"]
    assert user.content.startswith("q") and assistant.content == f"#### {user.content[1]}"
    questions = {prompt[-1].content[:2] for prompt in prompts if isinstance(prompt[-1], Message)}
    assert not questions & {user.content[:2], other.content[:2]}
    (held,) = load_eval(data, seed=0)
    assert held.items[0].prompt[:4] == prompts[0][:4]
    with pytest.raises(DataError, match=r"^data\.train\.few_shot\.num: expected at most 6 \(all items\), got 7"):
        load_train(
            DataConfig(train=SourceConfig(task="gsm8k", path=path, few_shot=FewShotConfig(num=7)), eval=None), seed=0
        )


def test_few_shot_examples_use_the_template_or_plain_text() -> None:
    from areal_rloo.models.tiny import make_tiny_tokenizer

    source = SourceConfig(few_shot=FewShotConfig(num=1), num_prompts=3)
    (loaded,) = load_train(DataConfig(train=source), seed=0)
    tokenizer = make_tiny_tokenizer()
    chat = ChatFormat(tokenizer, DataConfig())
    text = chat.text(chat.prompt(loaded.items[0]))
    example, _, prompt = text.partition("\n\n")
    assert example.partition("\n")[0].endswith("=?")
    assert "####" in example and prompt.endswith("=?\n")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    chat = ChatFormat(tokenizer, DataConfig(system_prompt="Add."))
    text = chat.text(chat.prompt(loaded.items[0]))
    assert text.startswith("[system]Add.[user]") and text.count("[assistant]") == 2


# Tasks


def test_custom_rows_are_texts_or_conversations_with_all_fields(tmp_path: Path) -> None:
    path = _rows(
        tmp_path / "a.jsonl",
        {"prompt": "p", "answer": 4, "level": 2},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    )
    first, second = make_task("data.train", SourceConfig(task="rows", path=path, rewards=MINE), seed=0).items("train")
    assert (first.prompt, first.answer, first.fields["level"]) == ("p", "4", 2)
    assert second.prompt == (Message("system", "s"), Message("user", "u"))
    with pytest.raises(DataError, match="task: rows has no reward of its own; name one under rewards"):
        make_task("data.train", SourceConfig(task="rows", path=path), seed=0)
    with pytest.raises(DataError, match="task: rows has no reward of its own; name one under rewards"):
        make_task(
            "data.train", SourceConfig(task="rows", path=path, rewards=(*MINE, RewardConfig(task="rows"))), seed=0
        )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "p"}, "a.jsonl:1: expected a text or messages in the field 'prompt', got the fields text"),
        ({"prompt": 3}, "a.jsonl:1: expected a text or messages in the field 'prompt', got int"),
        ({"prompt": ""}, "a.jsonl:1: expected a text or messages in the field 'prompt', got an empty text"),
        ({"prompt": [{"role": "robot", "content": ""}]}, "a.jsonl:1: expected messages of role and content"),
        (
            {"prompt": [{"role": "assistant", "content": ""}]},
            "a.jsonl:1: expected a conversation that the policy can",
        ),
        ({"prompt": []}, "a.jsonl:1: expected a conversation that the policy can"),
    ],
)
def test_a_row_without_a_valid_prompt_is_refused_with_its_line(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    path = _rows(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError) as caught:
        make_task("data.train", SourceConfig(task="rows", path=path, rewards=MINE), seed=0).items("train")
    assert words in str(caught.value)


def test_a_null_answer_becomes_empty(tmp_path: Path) -> None:
    path = _rows(tmp_path / "a.jsonl", {"prompt": "p", "answer": None})
    (item,) = make_task("data.train", SourceConfig(task="rows", path=path, rewards=MINE), seed=0).items("train")
    assert item.answer == ""


@pytest.mark.parametrize("value", ["1" * 5000, str(2**70), '"\\ud800"'])
def test_a_value_that_cannot_be_sent_is_refused_with_its_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p"}\n{"prompt": "q", "x": ' + value + "}\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2: "):
        make_task("data.train", SourceConfig(task="rows", path=str(tmp_path / "a.jsonl"), rewards=MINE), seed=0).items(
            "train"
        )


def test_a_repeated_id_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = _rows(
        tmp_path / "a.jsonl", {"id": "x", "prompt": "p"}, {"id": "y", "prompt": "q"}, {"id": "x", "prompt": "r"}
    )
    with pytest.raises(DataError, match=r"a\.jsonl:3: the field 'id' is 'x', as in .*a\.jsonl:1; ids must differ"):
        make_task("data.train", SourceConfig(task="rows", path=path, rewards=MINE), seed=0).items("train")


@pytest.fixture
def reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: make extras")


@pytest.mark.usefixtures("reasoning_gym")
def test_reasoning_gym_puzzles_are_scored_by_their_verifier() -> None:
    source = SourceConfig(task="reasoning_gym", parameters={"dataset": "leg_counting", "size": 5})
    task = make_task("data.train", source, seed=1)
    items = task.items("train")
    assert len(items) == 5
    for item in items:
        assert task.reward(f"thinking\n<answer>{item.answer}</answer>", item) == 1.0
        assert task.reward(f"<answer>{int(item.answer) + 1}</answer>", item) < 1.0
        assert task.reward(item.answer, item) < 1.0
        assert task.final_answer(f"<answer> {item.answer} </answer>") == item.answer
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=Item) == item
    assert [item.text for item in make_task("data.train", source, seed=1).items("train")] == [
        item.text for item in items
    ]
    assert [item.text for item in make_task("data.train", source, seed=2).items("train")] != [
        item.text for item in items
    ]
    one, other = (make_task("data.train", source, seed=seed).items("eval") for seed in (1, 2))
    assert [item.text for item in one] == [item.text for item in other]


@pytest.mark.usefixtures("reasoning_gym")
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"task": "reasoning_gym"}, "data.train.parameters.dataset: expected the name of a reasoning-gym dataset"),
        (
            {"task": "reasoning_gym", "parameters": {"dataset": "legs"}},
            "data.train.parameters: reasoning-gym refuses legs: Dataset 'legs' not",
        ),
        (
            {"task": "reasoning_gym", "parameters": {"dataset": "leg_counting", "x": 1}},
            "data.train.parameters: reasoning-gym refuses leg_counting: LegCountingConfig.__init__() got an unexpected",
        ),
    ],
)
def test_a_dataset_refused_by_reasoning_gym_fails_the_check_of_the_data(source: dict[str, Any], words: str) -> None:
    _check_refused(source, words)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"path": "a.jsonl"}, "data.train.path: the task arithmetic generates its items; leave path out"),
        ({"parameters": {"seed": 1}}, "data.train.parameters.seed: the task has no such parameter; it has none"),
        (
            {"task": "gsm8k", "parameters": {"last_number": True}},
            "data.train.parameters.last_number: the task has no such parameter; did you mean 'last_number_fallback'?",
        ),
        (
            {"task": "gsm8k", "parameters": {"last_number_fallback": 1}},
            "data.train.parameters.last_number_fallback: expected bool, got 1",
        ),
        ({"task": "nowhere.py:Task"}, "data.train.task: nowhere.py cannot be imported: FileNotFoundError"),
        ({"task": "math:sqrt2"}, "data.train.task: math has no class 'sqrt2'"),
    ],
)
def test_a_source_refused_by_its_task_fails_the_check_of_the_data(source: dict[str, Any], words: str) -> None:
    _check_refused(source, words)


def _check_refused(source: dict[str, Any], words: str) -> None:
    with pytest.raises((DataError, ConfigError)) as caught:
        check_data(DataConfig(train=SourceConfig(**source), eval=None))
    assert str(caught.value).startswith(words)


def test_the_last_number_counts_only_with_last_number_fallback(tmp_path: Path) -> None:
    path = _sums(tmp_path / "a.jsonl", "q0", "q1")
    for fallback, reward in ((False, 0.0), (True, 1.0)):
        parameters = {"last_number_fallback": fallback}
        task = make_task("data.train", SourceConfig(task="gsm8k", path=path, parameters=parameters), seed=0)
        item = task.items("train")[1]
        assert task.reward("so it is 1.", item) == reward
        assert (task.final_answer("so it is 1.") is not None) == fallback
        assert task.reward("it is 1 #### 2", item) == 0.0


def test_equal_answers_have_equal_keys_and_others_differ() -> None:
    task = make_task("data.train", SourceConfig(), seed=0)
    keys = [task.final_answer(f"#### {text}") for text in ("1000", "1,000", "1e3", "1000.0", "$1,000.00")]
    assert len(set(keys)) == 1
    assert len({task.final_answer(f"#### {text}") for text in ("0", "-1", "1", "10", "0.1", "none")}) == 6
    assert task.final_answer("1") is None


def test_a_custom_task_is_a_class_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "from areal_rloo.tasks import Item, Task\n"
        "class Mine(Task):\n"
        "    def __init__(self, source, seed): self.num = source.parameters['num']\n"
        "    def items(self, split): return [Item(str(n), str(n)) for n in range(self.num)]\n"
        "    def reward(self, completion, item): return float(completion == item.answer)\n"
        "def no_task(source, seed): return 3\n"
    )
    source = SourceConfig(task=f"{tmp_path / 'mine.py'}:Mine", parameters={"num": 3})
    (loaded,) = load_train(DataConfig(train=source, eval=None), seed=0)
    assert [item.text for item in loaded.items] == ["0", "1", "2"]
    assert loaded.label == loaded.items[0].source == "Mine"
    for name, got in (("no_task", "function"), ("Path", "a class without this base")):
        with pytest.raises(DataError, match=rf"to be a subclass of areal_rloo\.tasks\.Task, got {got}"):
            make_task("data.train", SourceConfig(task=f"{tmp_path / 'mine.py'}:{name}"), seed=0)


def test_train_prompts_that_are_all_evaluated_are_refused(tmp_path: Path) -> None:
    path = _sums(tmp_path / "a.jsonl", "q0", "q1")
    source, held_out = SourceConfig(task="gsm8k", path=path), EvalSourceConfig(task="gsm8k", path=path)
    with pytest.raises(DataError, match=r"^data\.train: no items are left without the duplicates"):
        load_train(DataConfig(train=source, eval=held_out, deduplicate=True), seed=0)


def test_parquet_fields_can_be_sent_and_other_values_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": "p", "when": datetime(2026, 1, 2, tzinfo=UTC), "raw": b"\xff", "price": Decimal("1.50")}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = SourceConfig(task="rows", path=str(tmp_path / "a.parquet"), rewards=MINE)
    (loaded,) = load_train(DataConfig(train=source, eval=None), seed=0)
    item = msgspec.msgpack.decode(msgspec.msgpack.encode(loaded.items[0]), type=Item)
    assert item.fields["raw"] == b"\xff"
    for field in (object(), 2**70, "\ud800"):
        item = Item("p", fields={"x": field})
        with pytest.raises(DataError, match=r"a\.parquet: item 1 \('p'\): expected fields that JSON can represent"):
            _prepared("data.train", source, [item], [], MOST_BYTES)


# The hub


@pytest.fixture
def datasets() -> None:
    pytest.importorskip("datasets", reason="the library of the hub is not installed: make extras")


def _hub(code: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a new process, because the library reads the environment on import."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


ROWS_OF_HUB = """
import sys
from areal_rloo.config import DataConfig, SourceConfig
from areal_rloo.errors import DataError
from areal_rloo.tasks import load_train
try:
    source = SourceConfig(task="gsm8k", hub=sys.argv[1] if len(sys.argv) > 1 else None)
    items = load_train(DataConfig(train=source, eval=None), seed=0)[0].items
    print(len(items), items[0].answer)
except DataError as error:
    print("error:", error)
"""


@pytest.mark.usefixtures("datasets")
def test_a_hub_dataset_is_read_online_and_from_the_cache(tmp_path: Path) -> None:
    """A local folder in the hub's layout uses the same function as a hub name."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    _sums(folder / "train.jsonl", "a", "b", "c")
    _sums(folder / "test.jsonl", "held")
    code = ROWS_OF_HUB.replace("sys.argv[1] if len(sys.argv) > 1 else None", repr(str(folder)))
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = _hub(code, tmp_path / "cache", **environment)
        assert done.stdout == "3 #### 0\n", done.stderr


@pytest.mark.usefixtures("datasets")
def test_without_network_and_cache_the_hub_error_is_one_line(tmp_path: Path) -> None:
    done = _hub(ROWS_OF_HUB, tmp_path / "cache", HF_HUB_OFFLINE="1")
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith(
        "error: data.train.path: cannot read openai/gsm8k:main (split train) from the hub or the cache"
    )
    assert done.stdout.rstrip().endswith("set path to a local file")


def test_without_its_library_the_hub_error_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['datasets'] = None\n" + ROWS_OF_HUB
    done = _hub(code, tmp_path / "cache")
    assert "which needs the `datasets` library" in done.stdout
    assert "pip install 'areal-rloo[data]'" in done.stdout
