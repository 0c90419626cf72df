"""The answer of a completion in GSM8K's format, `#### N`, as an exact number.

Input: the text of a completion. Output: a number, or None. The rules are strict: a completion without the mark has no
answer, a number elsewhere in the text does not count, and a second number after the first makes the answer ambiguous.
The time is linear in the length of any text.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal

from areal_rloo.errors import DataError, RewardError
from areal_rloo.trajectory import Item

_MARK = "####"
_GOLD = f"a number, alone or after '{_MARK}',"
_MOST_DIGITS = 20_000  # of an answer; no task asks for a longer number
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\uff0d": "-", "\uff0b": "+"})  # minus, en dash, full width
_CURRENCY = r"(?:US\$|\\\$|[$€£¥₹₩]|(?:USD|EUR|GBP|JPY|INR|Rs\.?)(?![A-Za-z]))"
_NUMBER = re.compile(
    rf"(?P<before>[-+]?)\s*(?:{_CURRENCY})?\s*(?P<after>[-+]?)"  # a sign may stand before or after a currency
    r"(?:(?P<grouped>\d{1,3}(?:,\d{3})+)|(?P<plain>\d+))?(?P<fraction>\.\d+)?"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3})(?!\d))?"
)
_UNIT_WORD = re.compile(r"(?:[A-Za-z°µ%$€£¥₹₩]+(?:/[A-Za-z]+)?[²³]?|\\%)")
_MOST_UNIT_WORDS = 4
_WRAPPERS = (("**", "**"), ("*", "*"), ("`", "`"), (r"\(", r"\)"), (r"\boxed{", "}"), ("$", "$"))  # outer ones first
_LAST_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def extract_answer(text: str) -> Decimal | None:
    """Return the number directly after the last mark; None without a mark or a number.

    Accepts thousands separators, a currency, a sign, decimals, powers of ten (`1e3`), digits of any script, a trailing
    unit or full stop, and wrappers of Markdown and LaTeX.
    """
    _, mark, tail = text.rpartition(_MARK)
    return _number(tail.lstrip().partition("\n")[0]) if mark else None


def gold_answer(text: str) -> Decimal | None:
    """Return the number of an expected answer: after the last mark, or the only line of a text without a mark."""
    return extract_answer(text) if _MARK in text else _number(text)


def check_gold(item: Item) -> None:
    """Check that the expected answer of an item is a number.

    Raises:
        DataError: the answer has no number, or several.
    """
    if gold_answer(item.answer) is None:
        raise DataError(f"expected {_GOLD} as the answer of {item.text[:60]!r}, got {item.answer[-40:]!r}")


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; for completions whose prompt did not ask for a mark."""
    numbers = deque(_LAST_NUMBER.finditer(text.translate(_MINUS)), maxlen=1)
    return _number(numbers[0].group().rstrip(",")) if numbers else None


def answer_reward(completion_text: str, gold_text: str, *, fallback: bool = False) -> float:
    """Return 1.0 if the completion has an answer equal to the expected number, else 0.0.

    `fallback`: if a completion has no mark, use the last number.

    Raises:
        RewardError: the expected answer has no number: without this error, every completion would get 0.
    """
    gold = gold_answer(gold_text)
    if gold is None:
        raise RewardError("reward_error", f"expected {_GOLD} as the answer of the item, got {gold_text[-40:]!r}")
    return float(_answer(completion_text, fallback) == gold)


def answer_key(completion_text: str, *, fallback: bool = False) -> str | None:
    """Return the answer of a completion as a text, equal for equal numbers; None without an answer."""
    answer = _answer(completion_text, fallback)
    if answer is None:
        return None
    sign, digits, exponent = answer.as_tuple()
    assert isinstance(exponent, int), "only finite numbers are extracted"
    text = "".join(map(str, digits)).lstrip("0")
    bare = text.rstrip("0")
    exponent += len(text) - len(bare)
    return f"{'-' * sign}{bare}e{exponent}" if bare else "0"


def _answer(completion_text: str, fallback: bool) -> Decimal | None:
    if fallback and _MARK not in completion_text:
        return last_number(completion_text)
    return extract_answer(completion_text)


def _number(line: str) -> Decimal | None:
    line = _unwrapped(line.translate(_MINUS).strip())
    match = _NUMBER.match(line)
    assert match is not None, "every part of the pattern may be absent"
    digits = (match["grouped"] or match["plain"] or "").replace(",", "")
    if not (digits or match["fraction"]) or len(digits) > _MOST_DIGITS or len(match["fraction"] or "") > _MOST_DIGITS:
        return None
    if (match["before"] and match["after"]) or not _is_unit(line[match.end() :]):
        return None
    number = Decimal(f"{digits or '0'}{match['fraction'] or ''}e{match['exponent'] or 0}")
    return number.copy_negate() if "-" in (match["before"], match["after"]) else number  # exact; unary minus rounds


def _is_unit(rest: str) -> bool:
    """Return True for an empty text, a full stop, or a few words without digits."""
    words = rest.strip().rstrip(".").split(maxsplit=_MOST_UNIT_WORDS)
    return len(words) <= _MOST_UNIT_WORDS and all(_UNIT_WORD.fullmatch(word.rstrip(".,")) for word in words)


def _unwrapped(line: str) -> str:
    for opening, closing in _WRAPPERS:
        body = line.removesuffix(".").rstrip()
        if len(body) > len(opening) + len(closing) and body.startswith(opening) and body.endswith(closing):
            line = body[len(opening) : len(body) - len(closing)].strip()
    return line
