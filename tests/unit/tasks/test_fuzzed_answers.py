"""Any text has an answer or none: no exception, whatever a policy writes."""

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.tasks.answers import answer_key, answer_reward, extract_answer, last_number
from areal_rloo.tasks.math import extract_boxed

_FRAGMENTS = st.sampled_from(
    [
        *("####", "#", "\n", " ", "-", "+", "\u2212", "$", "US$", "\\$", "€", "%", "\\%", ".", ",", "e", "E", "e999"),
        *("1", "12", "٣", "1,000", "9" * 50, "0" * 5000, "**", "`", r"\(", r"\)", r"\boxed{", r"\boxed", r"\fbox{"),
        *("{", "}", "dollars", "km/h", "\x00", "\ud800", "\U0001d7d8", "²", "½"),
    ]
)
_TEXTS = st.lists(_FRAGMENTS | st.text(max_size=3), max_size=12).map("".join)


@given(_TEXTS, st.booleans())
def test_any_text_has_an_answer_or_none(text: str, fallback: bool) -> None:
    for answer in (extract_answer(text), last_number(text)):
        assert answer is None or (isinstance(answer, Decimal) and answer.is_finite())
    assert answer_reward(text, "#### 12", fallback=fallback) in {0.0, 1.0}


@given(_TEXTS)
def test_equal_numbers_have_equal_keys(text: str) -> None:
    answer, key = extract_answer(text), answer_key(text)
    assert (answer is None) == (key is None)
    if answer is not None and key is not None:
        assert Decimal(key) == answer


@given(_TEXTS)
def test_a_box_is_found_in_any_text_or_not(text: str) -> None:
    boxed = extract_boxed(text)
    assert boxed is None or boxed in text
