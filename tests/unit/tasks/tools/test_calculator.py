"""The calculator: exact values, and an answer to any text."""

import re
from fractions import Fraction
from operator import add, floordiv, mod, mul, sub, truediv
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal_rloo.tasks.tools.calculator import calculate

OPERATORS = {"+": add, "-": sub, "*": mul, "/": truediv, "//": floordiv, "%": mod}
SIGNS = st.sampled_from(list(OPERATORS))
NUMBERS = st.one_of(
    st.integers(0, 10**12).map(lambda n: (str(n), Fraction(n))),
    st.integers(1000, 10**12).map(lambda n: (f"{n:,}", Fraction(n))),
    st.decimals(0, 10**6, places=3).map(lambda d: (str(d), Fraction(d))),
)


def _applied(sign: str, left: Fraction | None, right: Fraction | None) -> Fraction | None:
    """Apply Python's operator; None if there is no value."""
    if left is None or right is None or (sign in ("/", "//", "%") and not right):
        return None
    return Fraction(OPERATORS[sign](left, right))


def _joined(parts: Any) -> tuple[str, Fraction | None]:
    (left, left_value), sign, (right, right_value) = parts
    return f"({left}) {sign} ({right})", _applied(sign, left_value, right_value)


EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, SIGNS, inner).map(_joined),
        inner.map(lambda part: (f"-({part[0]})", None if part[1] is None else -part[1])),
        st.tuples(inner, st.integers(0, 4)).map(
            lambda part: (f"({part[0][0]})**{part[1]}", None if part[0][1] is None else part[0][1] ** part[1])
        ),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_any_expression_has_the_value_of_its_fractions(expression: tuple[str, Fraction | None]) -> None:
    text, value = expression
    told = calculate(text)
    if value is None:
        assert told == "error: division by zero"
    elif told.startswith("error"):
        assert "more than 1200 digits" in told
        assert "**" in text, "sums and products of these numbers all fit"
    elif value.denominator == 1:
        assert told == str(value)
    else:
        assert abs(Fraction(told) - value) <= abs(value) / 10**19


PARTS = st.tuples(st.sampled_from(["+", "-", "*", "//", "%", "**"]), st.integers(1, 3))


@given(st.lists(PARTS, max_size=8).filter(lambda parts: [sign for sign, _ in parts].count("**") <= 2))
def test_precedence_is_that_of_python(parts: list[tuple[str, int]]) -> None:
    """At most two powers, because Python computes powers of any size."""
    text = "-2" + "".join(f" {sign} {number}" for sign, number in parts)
    assert calculate(text) == str(eval(text))


@given(st.one_of(st.text(), st.text(alphabet="0123456789+-*/%().,eE ^_", max_size=60)))
@example("9**9**9**9")
@example("2**-9**9**9")
@example("1e999**1e999")
@example("0.1**1e-999")
@example("(1/3)**0.0001")
@example("(" * 10_000 + "1" + ")" * 10_000)
@example("(" * 500 + "1")
@example("-" * 1000)
@example("2**" * 300 + "2")
@example("1" * 10_000_000)
@example("+1" * 5_000_000)
@example("\ud800")
@example("1\x00+1")
def test_any_text_gets_a_short_line_at_once(text: str) -> None:
    """At once: computing a single example would take longer than the suite."""
    told = calculate(text)
    assert len(told) <= 1300
    assert "\n" not in told
    assert told.isascii()
    assert re.fullmatch(r"error: .{5,300}|-?\d+(\.\d+)?(E[-+]\d+)?", told)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("0.1+0.2", "0.3"),
        ("1/3", "0.33333333333333333333"),
        ("1/3*3", "1"),
        ("1,000", "1000"),
        ("1,234,567.50 * 2", "2469135"),
        ("2**100", "1267650600228229401496703205376"),
        ("-2**2", "-4"),
        ("2**3**2", "512"),
        ("-7 // 2", "-4"),
        ("4**0.5", "2"),
        ("(2**0.5)**2", "2"),
        ("2**0.5", "1.4142135623730950488"),
        ("3 × 4 ÷ 5 − 1", "1.4"),
        ("1e3", "1000"),
        ("1e30/7", "1.4285714285714285714E+29"),
        ("1.00000000000000000000000001 * 2", "2.00000000000000000000000002"),
    ],
)
def test_common_notations_give_exact_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9**9", "a number on the way has more than 1200 digits"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero: 0 to a negative power"),
        ("(-8)**(1/3)", "a negative number has no real power that is not whole"),
        ("2^3", "did not understand '^3'; powers are written **"),
        ("1,00", "did not understand ',00'"),
        ("(1", "a parenthesis is not closed"),
        ("1)", "expected an operator, not ')'"),
        ("1 +", "expected a number at the end"),
        ("2 * / 3", "expected a number, not '/'"),
        ("__import__('os')", "did not understand \"__import__('os')\""),
        ("(" * 200, "nested more than 100 deep"),
        ("1" * 1001, "the expression has 1001 characters; at most 1000 are allowed"),
    ],
)
def test_a_mistake_is_reported_and_not_raised(expression: str, reason: str) -> None:
    assert calculate(expression) == f"error: {reason}"
