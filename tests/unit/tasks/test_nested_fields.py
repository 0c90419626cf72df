"""Nested fields of rows, the prepared files of verl, and answers that are bare numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from areal_rloo.config import DataConfig, RewardConfig, SourceConfig
from areal_rloo.errors import DataError, RewardError
from areal_rloo.rewards import check_rewards
from areal_rloo.tasks import Message, check_data, load_train, make_task
from areal_rloo.tasks.answers import answer_reward, gold_answer

# Two rows of GSM8K.
ROWS = [
    {
        "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
        "How many clips did Natalia sell altogether in April and May?",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips "
        "altogether in April and May.\n#### 72",
    },
    {
        "question": "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. How "
        "much did she earn?",
        "answer": "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nWorking 50 minutes, she earned 0.2 x 50 = "
        "$<<0.2*50=10>>10.\n#### 10",
    },
]
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def _prepared_by_verl(index: int) -> dict[str, Any]:
    """Write a row as verl's examples/data_preprocess/gsm8k.py does."""
    row = ROWS[index]
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"].rpartition("#### ")[2]},
        "extra_info": {"split": "train", "index": index, **row},
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{','.join(lines)}]")
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_prepared_files_of_verl_are_read_as_they_are(suffix: str, tmp_path: Path) -> None:
    path = _write(tmp_path / f"train{suffix}", [_prepared_by_verl(0), _prepared_by_verl(1)])
    rewards = (RewardConfig(task="gsm8k"),)
    source = SourceConfig(task="rows", path=path, fields={"answer": "reward_model.ground_truth"}, rewards=rewards)
    data = DataConfig(train=source)
    check_rewards(data, check_data(data))
    (loaded,) = load_train(data, seed=0)
    first = loaded.items[0]
    assert first.prompt == (Message("user", f"{ROWS[0]['question']} {INSTRUCTION}"),)
    assert (first.answer, loaded.items[1].answer) == ("72", "10")
    scorer = make_task("data.train", SourceConfig(task="gsm8k"), seed=0)
    assert [scorer.reward(text, first) for text in ("so\n#### 72", "so\n#### 73", "72")] == [1.0, 0.0, 0.0]


def test_a_task_reads_its_fields_at_nested_paths(tmp_path: Path) -> None:
    path = _write(tmp_path / "train.parquet", [_prepared_by_verl(0)])
    for question in ("extra_info.question", "prompt[0].content", "prompt.0.content"):
        fields = {"question": question, "answer": "extra_info.answer"}
        (item,) = make_task("data.train", SourceConfig(task="gsm8k", path=path, fields=fields), seed=0).items("train")
        assert item.text.startswith(ROWS[0]["question"])
        assert item.answer == ROWS[0]["answer"]
        assert item.fields["reward_model"] == {"style": "rule", "ground_truth": "72"}


def test_a_field_with_dots_in_the_name_is_found_first(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [{"q.a": "flat", "q": {"a": "deep"}, "answer": "#### 1"}])
    source = SourceConfig(task="gsm8k", path=path, fields={"question": "q.a"})
    (item,) = make_task("data.train", source, seed=0).items("train")
    assert item.text.startswith("flat")


@pytest.mark.parametrize(
    ("nested", "words"),
    [
        ("extra.question", "got the fields data_source, prompt, ability, reward_model, extra_info"),
        ("extra_info.q", "got the fields split, index, question, answer in 'extra_info'"),
        ("prompt[1].content", "got a list of 1 in 'prompt'"),
        ("prompt.content", "got a list of 1 in 'prompt'"),
        ("prompt[0].text", "got the fields role, content in 'prompt.0'"),
        ("ability.x", "got str in 'ability'"),
        ("prompt[99999999999999999999]", "got a list of 1 in 'prompt'"),
        (".", "got the fields data_source, prompt, ability, reward_model, extra_info"),
    ],
)
def test_a_missing_step_of_a_path_is_named_with_the_fields(nested: str, words: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [_prepared_by_verl(0)])
    source = SourceConfig(task="gsm8k", path=path, fields={"question": nested})
    with pytest.raises(DataError) as caught:
        make_task("data.train", source, seed=0).items("train")
    assert str(caught.value) == f"{path}:1: expected a field '{nested}' (for question), {words}"


def test_keys_that_parquet_adds_to_messages_are_left_out(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "me"}]
    path = _write(tmp_path / "a.parquet", [{"prompt": prompt}])
    source = SourceConfig(task="rows", path=path, rewards=(RewardConfig(function="math:sqrt"),))
    (item,) = make_task("data.train", source, seed=0).items("train")
    assert item.prompt == (Message("system", "s"), Message("user", "u", name="me"))


# Bare answers


@pytest.mark.parametrize("answer", ["72", 72, 72.0, " 72\n", "$72", "72 clips", "so it is\n#### 72"])
def test_an_answer_of_gsm8k_may_be_a_bare_number(answer: object, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [{"question": "How many?", "answer": answer}])
    task = make_task("data.train", SourceConfig(task="gsm8k", path=path), seed=0)
    (item,) = task.items("train")
    assert [task.reward(text, item) for text in ("#### 72", "#### 7")] == [1.0, 0.0]
    assert task.reward(task.demonstration(item), item) == 1.0


@pytest.mark.parametrize("gold", ["", "seventy", "7 or 8", "#### many", "1\n2", "7 #### x"])
def test_an_expected_answer_without_a_number_is_never_scored_zero(gold: str) -> None:
    assert gold_answer(gold) is None
    with pytest.raises(RewardError, match="expected a number, alone or after '####', as the answer of the item"):
        answer_reward("#### 7", gold)


@pytest.mark.parametrize(
    ("task", "answer", "words"),
    [
        ("gsm8k", "a dozen", "expected a number, alone or after '####', as the answer of 'p', got 'a dozen'"),
        ("arithmetic", "", "expected a number, alone or after '####', as the answer of 'p', got ''"),
        ("math", "", "expected an answer in LaTeX for 'p', got an empty text"),
    ],
)
def test_rows_that_a_task_cannot_score_are_refused_at_start(task: str, answer: str, words: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [{"prompt": "o", "answer": "3"}, {"prompt": "p", "answer": answer}])
    rows = SourceConfig(task="rows", path=path, rewards=(RewardConfig(task=task),))
    data = DataConfig(train=(SourceConfig(), rows))
    with pytest.raises(DataError) as caught:
        check_rewards(data, check_data(data))
    assert str(caught.value) == f"data.train.1.rewards.0.task: {task}: {words}"
