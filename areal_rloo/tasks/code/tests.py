"""The two kinds of tests of a program, as they travel in the fields of an item."""

from __future__ import annotations

import msgspec


class OutputTests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The whole program runs for each test, and the text on stdout must be as expected."""

    inputs: tuple[str, ...]  # text on stdin, for each test
    outputs: tuple[str, ...]  # expected text on stdout
    tolerance: float = 0.0  # relative, for decimals; 0: numbers are equal or not
    imports: bool = True  # names of the standard library are imported before the program


class CallTests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Statements with asserts, which call functions of the program."""

    tests: tuple[str, ...]  # sources
    names: tuple[str, ...]  # the program defines these; the names of the tests go before the names of Python
    setup: str = ""  # source before the tests
    stub: str = ""  # beginning of the program, which a completion may continue; empty: none
    imports: bool = False  # names of the standard library are imported before the program


Tests = OutputTests | CallTests
