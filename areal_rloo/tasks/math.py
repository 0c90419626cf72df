r"""Competition mathematics in the format of MATH and MATH-500: a problem and a boxed answer (arXiv:2103.03874).

Reads the hub, or a file with `problem` and `answer`, or with `problem` and a `solution` that has `\boxed{...}`. A set
for TRL's `accuracy_reward` has `prompt`, often a conversation, and a `solution` of the answer alone, as `$2$`.

The reward compares the last `\boxed{...}` of a completion with the gold answer, both in LaTeX, by math-verify: 1.0 if
they are mathematically equal, else 0.0. The rules are strict: an answer must be in a box; words are compared as words,
not as products of their letters; a decimal equals a fraction only if the values are exactly equal. sympy can run
forever on an answer (`9^{9^{9^9}}`), so rewards run in the processes of a `RewardPool`, which can be killed.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from functools import cache, lru_cache
from typing import Any

import msgspec

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import DataError, SourceError, install
from areal_rloo.tasks.base import Item, Message
from areal_rloo.tasks.rows import Row, RowTask, prompt_of, text_field

_INSTRUCTION = "\nThink step by step, and put the final answer in \\boxed{}."
_BOXES = (r"\boxed", r"\fbox")
_MOST_CHARACTERS = 2_000  # of an answer; no task asks for a longer answer
_DIGITS = 12  # for the comparison of decimals
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|textit)\s*\{([^{}]*)\}")
_BETWEEN_ANSWERS = (
    *("$", r"\\", r"\to", r"\implies", r"\iff", r"\equiv", r"\approx", r"\sim", r"\neq", r"\cong", r"\text{or}"),
    *(r"\rightarrow", r"\Rightarrow", r"\longrightarrow", r"\mapsto", r"\leftrightarrow", r"\text{ or }", r"\lor", "≈"),
)
_IN_DOLLARS = re.compile(r"^\$\$?([^$]*[^$\\]|)\$\$?$")
_RUNNING_WORDS = re.compile(r"[A-Za-z]{2,} +[A-Za-z]{2,}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z .'-]+")


class MathTask(RowTask):
    """The task."""

    hub, eval_hub = "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        if importlib.util.find_spec("math_verify") is None:
            words = f"task: math needs math-verify; install the extra: {install('math')}"
            raise SourceError(words, absent=True)
        super().__init__(source, seed)

    def item(self, row: Row, where: str) -> Item:
        answer = row.get("answer")
        if answer is None and isinstance(row.get("solution"), str):
            answer = extract_boxed(row["solution"])
            answer = _alone(row["solution"]) if answer is None and "prompt" in row else answer
        if not isinstance(answer, str) or not answer.strip():
            raise DataError(rf"{where}: expected a text field 'answer', or a 'solution' with an answer in \boxed{{}}")
        return Item(_asked(row, where), answer, fields=row)

    def reward(self, completion: str, item: Item) -> float:
        return math_reward(completion, item.answer)

    def check_answer(self, item: Item) -> None:
        if not item.answer.strip():
            raise DataError(f"expected an answer in LaTeX for {item.text[:60]!r}, got an empty text")

    def final_answer(self, completion: str) -> str | None:
        """Return the boxed answer in a spelling that is equal for common variants."""
        answer = extract_boxed(completion)
        if not answer or len(answer) > _MOST_CHARACTERS:
            return None
        return _words(answer) or _plain(answer)

    def demonstration(self, item: Item) -> str:
        solution, box = item.fields.get("solution"), f"\\boxed{{{item.answer}}}"
        if not isinstance(solution, str) or _alone(solution) == item.answer:
            return box
        return solution if extract_boxed(solution) is not None else f"{solution}\n{box}"


def _asked(row: Row, where: str) -> str | tuple[Message, ...]:
    """Return the problem with the request for a box: the reward of an answer elsewhere is 0."""
    if row.get("problem") is not None or "prompt" not in row:
        return text_field(row, "problem", where) + _INSTRUCTION
    prompt = prompt_of(row, where)
    if isinstance(prompt, str):
        return prompt + _INSTRUCTION
    *before, last = prompt
    return (*before, msgspec.structs.replace(last, content=last.content + _INSTRUCTION))


def _alone(solution: str) -> str | None:
    """Return a solution without dollars around it if it is the answer alone; None if it has sentences, say."""
    answer = _IN_DOLLARS.sub(r"\1", solution.strip()).strip()
    is_derivation = "\n" in answer or "####" in answer or (_RUNNING_WORDS.search(answer) and _words(answer) is None)
    return None if is_derivation else answer


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` (or `\boxed x`) with balanced braces; None without a box."""
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
    """Return 1.0 if the boxed answer of the completion equals the gold answer, given without a box; else 0.0."""
    answer = extract_boxed(completion_text)
    if not answer or len(answer) > _MOST_CHARACTERS:
        return 0.0
    if _plain(answer) == _plain(gold):
        return 1.0
    words = _words(gold)
    if words is not None or _words(answer) is not None:
        return float(words == _words(answer))
    if _claims_something_else(answer, gold):
        return 0.0
    return float(
        _library().verify(_parsed(gold), _parse(answer), strict=True, float_rounding=_DIGITS, timeout_seconds=None)
    )


def _claims_something_else(answer: str, gold: str) -> bool:
    """Return True for several answers, or an equation of two numbers, unless the gold answer has the same form.

    math-verify would accept either side of such a mark as the answer, and a wrong completion may have one right side.
    """
    if any(mark in answer and mark not in gold for mark in _BETWEEN_ANSWERS) or answer.count("=") > max(
        1, gold.count("=")
    ):
        return True
    left, equals, _ = answer.partition("=")
    return bool(equals) and "=" not in gold and bool(re.search(r"\d", left)) and not re.search(r"[A-Za-z]", left)


def _words(answer: str) -> str | None:
    """Return an answer of one or more words in lower case; None if it contains more than letters."""
    bare = _TEXT.sub(r"\1", answer).strip().strip("()").strip(". ")
    return bare.lower() if _WORDS.fullmatch(bare) else None


def _plain(answer: str) -> str:
    return re.sub(r"\s+|\\left|\\right|\\!|\\,", "", answer).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")


@lru_cache(maxsize=4096)
def _parsed(gold: str) -> Any:
    return _parse(gold)


def _parse(answer: str) -> Any:
    library = _library()
    config = (library.LatexExtractionConfig(), library.ExprExtractionConfig())
    return library.parse(f"${answer}$", extraction_config=config, parsing_timeout=None)


@cache
def _library() -> Any:
    """Import math-verify, which takes a second for sympy."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # noqa: TID251 - it warns about a missing time limit, which the pool enforces
    return importlib.import_module("math_verify")
