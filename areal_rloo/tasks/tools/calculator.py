"""A calculator for a model: the text of an expression in, the text of the value or of the mistake out.

    expression ─► tokens, checked ─► Python's syntax tree (`ast.parse`) ─► a Fraction at every node ─► text

Nothing is executed. Every text gets an answer within milliseconds, and no text raises an exception: the length, the
nesting and the size of every number have limits, which are checked before each computation. `ast` gives precedence and
nesting. The check of tokens gives messages that help a model more than Python's syntax errors.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal, Inexact
from fractions import Fraction

_MOST_CHARACTERS = 1000
_MOST_NESTED = 100  # open parentheses, or operators inside each other; far below Python's recursion limit
_MOST_BITS = 4096  # of a numerator or a denominator: about 1200 digits, fewer than Python refuses to print
_TOO_LARGE = "a number on the way has more than 1200 digits"
_TOO_DEEP = f"nested more than {_MOST_NESTED} deep"
_DIGITS = 20  # of a rounded value
_MOST_EXACT_DIGITS = 40  # of a decimal shown exactly
_ROOT_DIGITS = 60  # finer than the shown digits, so 2**0.5 * 2**0.5 is 2

_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/"})  # − – × · ÷
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
    r"|\.[0-9]+(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?)|(?P<sign>\*\*|//|[-+*/%()]))"
)


class _ExpressionError(Exception):
    """A mistake in an expression, described for the model."""


def calculate(expression: str) -> str:
    """Return the value of an expression, or `error: ` and the reason, on one line; raise no exception.

    Understands `+ - * / // % **`, signs, parentheses, decimals, powers of ten and thousands separators, with Python's
    precedence. Integers and short decimals are exact; other values have 20 digits.
    """
    if len(expression) > _MOST_CHARACTERS:
        return f"error: the expression has {len(expression)} characters; at most {_MOST_CHARACTERS} are allowed"
    try:
        tree, numbers = _parsed(expression.translate(_SIGNS).strip())
        return _shown(_value(tree, numbers, 0))
    except _ExpressionError as mistake:
        return f"error: {mistake}"


def _parsed(expression: str) -> tuple[ast.expr, list[Fraction]]:
    """Parse an expression into a tree whose constants are indices into the list of numbers.

    The indices keep decimals exact; Python would read them as floats.
    """
    parts: list[str] = []
    numbers: list[Fraction] = []
    wants_number, num_open, position = True, 0, 0
    while position < len(expression):
        token = _TOKEN.match(expression, position)
        if token is None:
            hint = "; powers are written **" if expression[position:].lstrip().startswith("^") else ""
            raise _ExpressionError(f"did not understand {expression[position : position + 20].strip()!a}{hint}")
        number, sign, position = token["number"], token["sign"], token.end()
        if wants_number and sign not in ("+", "-", "(", None):
            raise _ExpressionError(f"expected a number, not '{sign}'")
        if not wants_number and (number or sign == "(" or (sign == ")" and not num_open)):
            raise _ExpressionError(f"expected an operator, not '{number or sign}'")
        num_open += (sign == "(") - (sign == ")")
        if num_open > _MOST_NESTED:
            raise _ExpressionError(_TOO_DEEP)
        wants_number = sign not in (")", None)
        parts.append(sign or str(len(numbers)))
        if number:
            numbers.append(_bounded(Fraction(number.replace(",", ""))))
    if wants_number or num_open:
        raise _ExpressionError("expected a number at the end" if wants_number else "a parenthesis is not closed")
    try:
        return ast.parse(" ".join(parts), mode="eval").body, numbers
    except (SyntaxError, RecursionError, MemoryError):  # the tokens are correct, so the parser's stack is too small
        raise _ExpressionError(_TOO_DEEP) from None


def _value(node: ast.expr, numbers: Sequence[Fraction], depth: int) -> Fraction:
    """Compute a tree. Left operands are taken in a loop: a sum of 500 numbers is a tree of depth 500."""
    if depth > _MOST_NESTED:
        raise _ExpressionError(_TOO_DEEP)
    operations: list[ast.BinOp] = []
    while isinstance(node, ast.BinOp):
        operations.append(node)
        node = node.left
    match node:
        case ast.UnaryOp(op=sign, operand=operand):
            value = _value(operand, numbers, depth + 1)
            value = -value if isinstance(sign, ast.USub) else value
        case ast.Constant(value=int(index)):
            value = numbers[index]
        case _:
            raise AssertionError(f"the tokens allow no {ast.dump(node)}")
    for operation in reversed(operations):
        right = _value(operation.right, numbers, depth + 1)
        if isinstance(operation.op, ast.Div | ast.FloorDiv | ast.Mod) and not right:
            raise _ExpressionError("division by zero")
        value = _bounded(Fraction(_OPERATORS[type(operation.op)](value, right)))
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if not base and exponent < 0:
        raise _ExpressionError("division by zero: 0 to a negative power")
    if exponent.denominator != 1:
        return _root(base, exponent)
    whole = exponent.numerator
    if base in (-1, 0, 1) and whole:
        whole = whole % 2 + 2  # the powers of these bases repeat
    if abs(whole) * (_bits(base) - 1) > _MOST_BITS:  # checked before the power, which could fill the memory
        raise _ExpressionError(_TOO_LARGE)
    return Fraction(base**whole)


def _root(base: Fraction, exponent: Fraction) -> Fraction:
    """Compute a power that is usually irrational, to three times the shown digits."""
    if base < 0:
        raise _ExpressionError("a negative number has no real power that is not whole")
    if not base:
        return base
    if abs(exponent) * _bits(base) > _MOST_BITS:
        raise _ExpressionError(_TOO_LARGE)
    context = Context(prec=_ROOT_DIGITS)
    return Fraction(context.power(_decimal(base, context), _decimal(exponent, context)))


_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > _MOST_BITS:
        raise _ExpressionError(_TOO_LARGE)
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _decimal(value: Fraction, context: Context) -> Decimal:
    return context.divide(Decimal(value.numerator), Decimal(value.denominator))


def _shown(value: Fraction) -> str:
    """Write integers and short decimals exactly, and other values rounded."""
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=_MOST_EXACT_DIGITS, traps=[])
    number = _decimal(value, context)
    if context.flags[Inexact]:
        number = _decimal(value, Context(prec=_DIGITS))
    number = number.normalize(context)
    return f"{number:f}" if -_DIGITS < number.adjusted() < _DIGITS else str(number)
