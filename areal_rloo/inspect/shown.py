"""Show numbers and untrusted text on a terminal or a page, and give report.html and trajectories.html one style.

A model may write any text. No such text may move the cursor, change colors or the writing direction. The pages load
nothing.
"""

from __future__ import annotations

import html
import unicodedata

NUM_COLORS = 6
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #f6f7f8; --card: #fff; --line: #d9dde2; --soft: #66707c;
  --c0: #2f6fde; --c1: #dd6b20; --c2: #2f9e5b; --c3: #8e4ec6; --c4: #c2304f; --c5: #5f6b7a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #12161b; --card: #1a2027; --line: #343c46; --soft: #97a2ae;
    --c0: #6ea2ff; --c1: #f59a57; --c2: #5cc98a; --c3: #bd8cf0; --c4: #f0758f; --c5: #a3afbd; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1360px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: .95rem; font-weight: 600; margin: 0 0 .3rem; }
p { margin: .1rem 0; } .soft { color: var(--soft); } a { color: var(--c0); }
.state { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; border: 1px solid var(--line);
         font-size: .85rem; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
summary { cursor: pointer; } pre { overflow-x: auto; font-size: .82rem; line-height: 1.4; }
"""
_JOINERS = "\u200c\u200d\u00ad"  # harmless parts of words and emoji


class _Visible(dict[int, str]):
    """A table for str.translate: replaces control characters by visible characters."""

    def __missing__(self, code: int) -> str:
        shown = chr(code)
        if shown not in _JOINERS and unicodedata.category(shown) in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
            shown = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
            if code < 0x20:
                shown = chr(0x2400 + code)  # the block "Control Pictures"
        self[code] = shown
        return shown


_TEXT = _Visible({ord("\n"): "\n", ord("\t"): "\t", 0x7F: "␡"})
_LINE = _Visible({ord("\n"): "⏎", ord("\t"): "⇥", 0x7F: "␡"})


def visible(text: str) -> str:
    """Make untrusted text visible; keep line breaks and tabs."""
    return text.translate(_TEXT)


def visible_line(text: str) -> str:
    """Make untrusted text visible, on a single line."""
    return text.translate(_LINE)


def number(value: float) -> str:
    """Format a number with three significant digits; from 1,000 to 1e15, with all digits and thousands separators."""
    if value == 0:
        return "0"  # not -0
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def signed(value: float) -> str:
    """Format a number with an explicit sign."""
    return f"+{number(value)}" if value > 0 else number(value)


def kept_ends(length: int, most: int) -> tuple[int, int]:
    """Return lengths of head and tail, at most `most` together. The tail is longer, because answers are at the end."""
    if length <= most:
        return length, 0
    return most // 3, most - most // 3


def shortened(text: str, most: int) -> str:
    """Cut the middle of a text with more than `most` characters."""
    head, tail = kept_ends(len(text), most)
    return text if not tail else f"{text[:head]} … {len(text) - most:,} characters … {text[-tail:]}"


def document(title: str, body: str, *, style: str, head: str = "") -> str:
    """Make a page. `title` is text; `body`, `style` and `head` are markup."""
    return "\n".join(
        [
            "<!doctype html><html lang=en><head><meta charset=utf-8>",
            "<meta name=viewport content='width=device-width, initial-scale=1'>",
            f"{head}<title>{html.escape(title)}</title><style>{_STYLE}{style}</style></head><body>",
            body,
            "</body></html>",
        ]
    )
