r"""Mathematical answers in LaTeX: the last `\boxed{...}` of a completion against a gold answer, by math-verify.

In: a completion and a gold answer. Out: 1.0 where they are the same mathematically, else 0.0. Strict on purpose: what
is not in a box is no answer; words are compared as words, not as products of their letters; a decimal equals a fraction
only where it is exactly that. What sympy makes of an answer can take for ever (`9^{9^{9^9}}`), so this runs where it
can be killed: in a `RewardPool`.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

_BOXES = (r"\boxed", r"\fbox")
_MOST_CHARACTERS = 2_000  # of an answer; what is longer was not asked for
_DIGITS = 12  # to which decimals have to agree
_CONFIG = (LatexExtractionConfig(), ExprExtractionConfig())
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|textit)\s*\{([^{}]*)\}")
_BETWEEN_ANSWERS = (
    *("$", r"\\", r"\to", r"\implies", r"\iff", r"\equiv", r"\approx", r"\sim", r"\neq", r"\cong", r"\text{or}"),
    *(r"\rightarrow", r"\Rightarrow", r"\longrightarrow", r"\mapsto", r"\leftrightarrow", r"\text{ or }", r"\lor", "≈"),
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z .'-]+")

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # noqa: TID251 - it warns that nothing limits its time; the pool does


def extract_boxed(text: str) -> str | None:
    r"""What is in the last `\boxed{...}` (or `\boxed x`), braces balanced; None without one."""
    start, box = max((text.rfind(box), box) for box in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(box) :].lstrip()
    if not rest.startswith("{"):
        return rest.split(maxsplit=1)[0].strip("$.,") if rest else None
    depth = 0
    for index, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:index].strip()
    return None


def math_reward(completion_text: str, gold: str) -> float:
    """1.0 where the boxed answer of the completion equals the gold answer.

    Args:
        completion_text: with its answer in a box.
        gold: the answer alone, in LaTeX.
    """
    answer = extract_boxed(completion_text)
    if answer is None or not answer or len(answer) > _MOST_CHARACTERS:
        return 0.0
    if _plain(answer) == _plain(gold):
        return 1.0
    words = _words(gold)
    if words is not None or _words(answer) is not None:
        return float(words == _words(answer))
    if _claims_something_else(answer, gold):
        return 0.0
    return float(verify(_parsed(gold), _parse(answer), strict=True, float_rounding=_DIGITS, timeout_seconds=None))


def answer_key(completion_text: str) -> str | None:
    """The boxed answer of a completion, spelled so that the commonest rewritings are equal texts; None without one."""
    answer = extract_boxed(completion_text)
    if not answer or len(answer) > _MOST_CHARACTERS:
        return None
    return _words(answer) or _plain(answer)


def _claims_something_else(answer: str, gold: str) -> bool:
    """Several answers are none, and an equation between two numbers is a claim, unless the gold answer is of that kind.

    What stands on either side of such a mark would be read as the answer by itself, and one of them may well be right.
    """
    if any(mark in answer and mark not in gold for mark in _BETWEEN_ANSWERS) or answer.count("=") > max(
        1, gold.count("=")
    ):
        return True
    left, equals, _ = answer.partition("=")
    return bool(equals) and "=" not in gold and bool(re.search(r"\d", left)) and not re.search(r"[A-Za-z]", left)


def _words(answer: str) -> str | None:
    """An answer that is a word or a few, in lower case; None for anything with more than letters in it."""
    bare = _TEXT.sub(r"\1", answer).strip().strip("()").strip(". ")
    return bare.lower() if _WORDS.fullmatch(bare) else None


def _plain(answer: str) -> str:
    return re.sub(r"\s+|\\left|\\right|\\!|\\,", "", answer).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")


@lru_cache(maxsize=4096)
def _parsed(gold: str) -> Any:
    return _parse(gold)


def _parse(answer: str) -> Any:
    return parse(f"${answer}$", extraction_config=_CONFIG, parsing_timeout=None)
