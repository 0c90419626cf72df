"""GSM8K answers: accepted and refused forms."""

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from areal_rloo.tasks.answers import answer_reward, extract_answer, last_number


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
        ("#### 10 km/h", "10"),
        ("#### 4 m²", "4"),
        ("#### 1e3", "1000"),
        ("#### 1,000.00", "1000"),
        ("#### ４２", "42"),
        ("#### ٤٢", "42"),
        ("#### \u22125", "-5"),
        ("#### USD 5", "5"),
        ("#### 5 USD.", "5"),
        ("#### **18**", "18"),
        ("#### $18$.", "18"),
        (r"#### \boxed{18}", "18"),
        (r"#### \$18", "18"),
        (r"#### 18\%", "18"),
        ("####42", "42"),
        ("#### -0", "0"),
        ("The 7 of them had 3 left, so 21.\n#### 12\nThat is what was asked.", "12"),
    ],
)
def test_numbers_after_the_mark_are_parsed(text: str, answer: str) -> None:
    assert extract_answer(text) == Decimal(answer)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "the answer is 42",
        "####",
        "#### none",
        "#### 4 or 5",
        "#### 3+5",
        "#### 1,23",
        "#### --3",
        "42 ####",
        "#### 4²",
        "#### 1/2",
        "#### 1 2/3",
        "#### 5 6",
        "#### 42 43 km",
        "#### 1e3000",
        "#### USDX 5",
        "#### 3 x 5",
    ],
)
def test_text_without_an_answer_gets_no_reward(text: str) -> None:
    assert extract_answer(text) is None
    assert answer_reward(text, "#### 42") == 0.0


def test_a_longer_number_that_contains_the_answer_is_wrong() -> None:
    assert answer_reward("#### 420", "#### 42") == 0.0
    assert answer_reward("#### 42.0", "#### 42") == 1.0


def test_gold_answers_of_gsm8k_are_right_and_changed_ones_wrong(gsm8k_folder: Path) -> None:
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


def test_an_answer_of_ten_thousand_digits_is_compared_completely() -> None:
    gold = "#### " + "7" * 9_999
    assert answer_reward(gold + "1", gold + "1") == 1.0
    assert answer_reward(gold + "1", gold + "2") == 0.0
    assert answer_reward("#### -" + "7" * 9_999 + "1", "#### -" + "7" * 9_999 + "2") == 0.0, (
        "minus rounds, and must not"
    )


@pytest.mark.parametrize(
    "tail", ["1" * 10**6, "5 " + "a" * 10**6 + "!", "5 " + "a " * 500_000, "1," * 300_000, "*" * 10**6, "-" * 10**6]
)
def test_a_megabyte_after_the_mark_is_no_answer(tail: str) -> None:
    """A pattern with backtracking would never finish on these texts."""
    assert extract_answer("#### " + tail) is None


def test_a_megabyte_before_the_mark_does_not_matter() -> None:
    assert extract_answer("#### 3\n" * 100_000 + "#### 5") == 5


def test_the_last_number_counts_only_as_a_configured_fallback() -> None:
    assert answer_reward("so it is 1,042.", "#### 1042") == 0.0
    assert answer_reward("so it is 1,042.", "#### 1042", fallback=True) == 1.0
    assert answer_reward("it was 42\n#### 7 or 8", "#### 42", fallback=True) == 0.0
    assert last_number("-3 and \u22124.5 kg") == Decimal("-4.5")
    assert last_number("none at all") is None
