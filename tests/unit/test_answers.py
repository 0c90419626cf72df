"""GSM8K answers: what counts, and what must not."""

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from areal_rloo.rewards.answers import answer_reward, extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 42", "42"),
        ("so\n#### 1,234,567", "1234567"),
        ("#### $18.50", "18.50"),
        ("#### -3", "-3"),
        ("#### -$7", "-7"),
        ("#### $-7", "-7"),
        ("#### 12 apples", "12"),
        ("#### 50%", "50"),
        ("#### 42.", "42"),
        ("#### .5", "0.5"),
        ("#### 1\n#### 2", "2"),
        ("#### 8 km per hour.", "8"),
    ],
)
def test_numbers_behind_the_mark_are_understood(text: str, answer: str) -> None:
    assert extract_answer(text) == Decimal(answer)


@pytest.mark.parametrize(
    "text",
    ["", "42", "the answer is 42", "####", "#### none", "#### 4 or 5", "#### 3+5", "#### 1,23", "#### --3", "42 ####"],
)
def test_what_is_no_answer_earns_nothing(text: str) -> None:
    assert extract_answer(text) is None
    assert answer_reward(text, "#### 42") == 0.0


def test_a_longer_number_that_contains_the_answer_is_wrong() -> None:
    assert answer_reward("#### 420", "#### 42") == 0.0
    assert answer_reward("#### 42.0", "#### 42") == 1.0


def test_every_gold_answer_of_gsm8k_is_right_and_wrong_when_its_number_is_changed(gsm8k_folder: Path) -> None:
    num = 0
    for split in ("train", "test"):
        for line in (gsm8k_folder / f"{split}.jsonl").read_text().splitlines():
            gold = json.loads(line)["answer"]
            assert answer_reward(gold, gold) == 1.0, gold
            head, _, number = gold.rpartition("#### ")
            changed = f"{head}#### {int(re.sub('[,]', '', number)) + 1}"
            assert answer_reward(changed, gold) == 0.0, changed
            num += 1
    assert num == 8792
