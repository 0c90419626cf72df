"""The answer of a completion in GSM8K's format, `#### N` on its last line, as an exact number.

Strict on purpose: a completion without the mark has no answer, and a number elsewhere in the text earns nothing.
"""

from __future__ import annotations

import re
from decimal import Decimal

_MARK = "####"
_NUMBER = re.compile(
    r"""
    (?P<before>[-+]?)\s*[$€£¥]?\s*(?P<after>[-+]?)     # a sign on either side of a currency
    (?P<digits>\d{1,3}(?:,\d{3})+|\d+)?(?P<fraction>\.\d+)?
    (?P<rest>.*)
    """,
    re.VERBOSE,
)
_UNIT = re.compile(r"\s*(?:%|\.|[.]?\s*(?:[A-Za-z$€£¥°/%²³]+[\s.]*){0,4})\s*")


def extract_answer(text: str) -> Decimal | None:
    """The number after the last mark, or None where there is no mark or no number right behind it.

    Thousands separators, a currency, a sign, decimals, and a trailing unit or full stop are understood. A second number
    behind the first makes the answer ambiguous: None.
    """
    _, mark, tail = text.rpartition(_MARK)
    line = tail.strip().split("\n", 1)[0].strip()
    match = _NUMBER.fullmatch(line)
    if not mark or match is None or not (match["digits"] or match["fraction"]):
        return None
    if (match["before"] and match["after"]) or not _UNIT.fullmatch(match["rest"]):
        return None
    number = Decimal((match["digits"] or "0").replace(",", "") + (match["fraction"] or ""))
    return -number if "-" in (match["before"], match["after"]) else number


def answer_reward(completion_text: str, gold_text: str) -> float:
    """1.0 where both texts hold an answer and the numbers are equal, else 0.0."""
    gold = extract_answer(gold_text)
    return float(gold is not None and extract_answer(completion_text) == gold)
