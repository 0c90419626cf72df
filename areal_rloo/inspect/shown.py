"""How numbers and foreign text are shown, on a terminal and on a page.

A completion is whatever a model wrote: nothing of it may move a cursor, change a color or turn the writing direction.
"""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200c\u200d\u00ad"  # part of words and emoji, and harmless
_CONTROL_PICTURES = 0x2400


class _Visible(dict[int, str]):
    """For str.translate: characters that steer a terminal or a reader, as something to see."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if character not in _JOINERS and unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
            self[code] = _picture(code)
        else:
            self[code] = character
        return self[code]


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(_CONTROL_PICTURES + code)
    if code == 0x7F:
        return "␡"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


_TEXT = _Visible({ord("\n"): "\n", ord("\t"): "\t"})
_LINE = _Visible({ord("\n"): "⏎", ord("\t"): "⇥"})


def visible(text: str) -> str:
    """Foreign text over several lines."""
    return text.translate(_TEXT)


def visible_line(text: str) -> str:
    """Foreign text in one line."""
    return text.translate(_LINE)


def number(value: float) -> str:
    """A number as a reader wants it: no digits that say nothing."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def signed(value: float) -> str:
    """A number whose sign matters."""
    return f"+{number(value)}" if value > 0 else number(value)


def kept_ends(length: int, most: int) -> tuple[int, int]:
    """How much of a beginning and of an end to show, `most` at most; the end has more, for answers stand there."""
    if length <= most:
        return length, 0
    return most // 3, most - most // 3


def shortened(text: str, most: int) -> str:
    """A text without its middle where it is longer than `most` characters."""
    head, tail = kept_ends(len(text), most)
    return text if not tail else f"{text[:head]} … {len(text) - most:,} characters … {text[-tail:]}"
