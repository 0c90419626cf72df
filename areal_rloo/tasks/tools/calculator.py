"""A calculator for a model: the text of an expression in, the text of its value or of what is wrong with it out.

    expression ─► tokens ─► one exact Fraction at every step ─► an integer, a decimal, or `error: ...`

Whatever the text holds, it is answered in milliseconds and never with an exception: its length, its nesting and the
size of every number on the way are bounded before anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Context, Decimal, Inexact
from fractions import Fraction

_MOST_CHARACTERS = 1000
_MOST_NESTED = 100  # parentheses, signs and powers inside one another; far below Python's own recursion limit
_MOST_BITS = 4096  # of a numerator or a denominator; about 1200 digits, fewer than Python refuses to print
_TOO_LARGE = "a number on the way has more than 1200 digits"
_DIGITS = 20  # of a value that has to be rounded
_MOST_EXACT_DIGITS = 40  # of a decimal that is shown whole
_ROOT_DIGITS = 60  # so much finer than what is shown that 2**0.5 * 2**0.5 is 2

_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/"})  # − – × · ÷
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
    r"|\.[0-9]+(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?)|(?P<sign>\*\*|//|[-+*/%()]))"
)
_BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": 4}  # a sign before a value binds with 3, as in Python


class _ExpressionError(Exception):
    """What is wrong with an expression, in words for the model."""


def calculate(expression: str) -> str:
    """The value of an expression, or `error: ` and why there is none, on one line; never an exception.

    `+ - * / // % **`, signs, parentheses, decimals, powers of ten and thousands separators are understood, with
    Python's precedence. Integers and decimals are exact; a value that has no end has 20 digits.
    """
    if len(expression) > _MOST_CHARACTERS:
        return f"error: the expression has {len(expression)} characters; at most {_MOST_CHARACTERS} are allowed"
    try:
        return _shown(_Parser(expression.translate(_SIGNS)).value())
    except _ExpressionError as mistake:
        return f"error: {mistake}"


class _Parser:
    """Precedence climbing over the tokens of one expression; computes as it reads."""

    def __init__(self, expression: str) -> None:
        self._tokens = list(_tokens(expression))
        self._next_index = 0

    def value(self) -> Fraction:
        value = self._operation(0, 0)
        if self._next_index < len(self._tokens):
            raise _ExpressionError(f"expected an operator, not '{self._tokens[self._next_index]}'")
        return value

    def _operation(self, least: int, depth: int) -> Fraction:
        """A value and every operator behind it that binds at least as tightly as `least`."""
        left = self._operand(depth)
        while _BINDS.get(self._peek(), -1) >= least:
            sign = self._take()
            # What binds as tightly stands to the left, but powers are read from the right: 2**3**2 is 2**9.
            right = self._operation(_BINDS[sign] + (sign != "**"), depth + 1)
            left = _computed(sign, left, right)
        return left

    def _operand(self, depth: int) -> Fraction:
        if depth > _MOST_NESTED:
            raise _ExpressionError(f"nested more than {_MOST_NESTED} deep")
        token = self._take()
        if token in ("-", "+"):
            value = self._operation(_BINDS["**"], depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self._operation(0, depth + 1)
            if self._take() != ")":
                raise _ExpressionError("a parenthesis is not closed")
            return value
        if token in _BINDS or token in ("", ")"):
            raise _ExpressionError(f"expected a number, not '{token}'" if token else "expected a number at the end")
        return _bounded(Fraction(token))

    def _peek(self) -> str:
        """The next token, or nothing at the end."""
        return self._tokens[self._next_index] if self._next_index < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next_index += 1
        return token


def _tokens(expression: str) -> Iterator[str]:
    """Numbers without their separators, and signs."""
    expression = expression.strip()
    position = 0
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None:
            hint = "; powers are written **" if expression[position:].lstrip().startswith("^") else ""
            raise _ExpressionError(f"did not understand {expression[position : position + 20].strip()!a}{hint}")
        yield match["sign"] or match["number"].replace(",", "")
        position = match.end()


def _computed(sign: str, left: Fraction, right: Fraction) -> Fraction:
    if sign in ("/", "//", "%") and not right:
        raise _ExpressionError("division by zero")
    match sign:
        case "+":
            value = left + right
        case "-":
            value = left - right
        case "*":
            value = left * right
        case "/":
            value = left / right
        case "//":
            value = Fraction(left // right)
        case "%":
            value = left % right
        case _:
            value = _power(left, right)
    return _bounded(value)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if not base and exponent < 0:
        raise _ExpressionError("division by zero: 0 to a negative power")
    if exponent.denominator != 1:
        return _root(base, exponent)
    whole = exponent.numerator
    if base in (-1, 0, 1) and whole:
        whole = whole % 2 + 2  # their powers come again
    if abs(whole) * (_bits(base) - 1) > _MOST_BITS:  # told from the sizes: the power itself may not fit into any memory
        raise _ExpressionError(_TOO_LARGE)
    return Fraction(base**whole)


def _root(base: Fraction, exponent: Fraction) -> Fraction:
    """A power that is no fraction as a rule, to three times the digits that are shown."""
    if base < 0:
        raise _ExpressionError("a negative number has no real power that is not whole")
    if not base:
        return base
    if abs(exponent) * _bits(base) > _MOST_BITS:
        raise _ExpressionError(_TOO_LARGE)
    context = Context(prec=_ROOT_DIGITS)
    return Fraction(context.power(_decimal(base, context), _decimal(exponent, context)))


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > _MOST_BITS:
        raise _ExpressionError(_TOO_LARGE)
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _decimal(value: Fraction, context: Context) -> Decimal:
    return context.divide(Decimal(value.numerator), Decimal(value.denominator))


def _shown(value: Fraction) -> str:
    """Digit by digit where the value is an integer or a short decimal, else rounded."""
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=_MOST_EXACT_DIGITS, traps=[])
    number = _decimal(value, context)
    if context.flags[Inexact]:
        number = _decimal(value, Context(prec=_DIGITS))
    number = number.normalize(context)
    return f"{number:f}" if -_DIGITS < number.adjusted() < _DIGITS else str(number)
