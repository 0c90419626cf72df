"""The look of a run folder's pages, the report's and this one's: a body in, a page that loads nothing out."""

from __future__ import annotations

import html
from collections.abc import Sequence

NUM_COLORS = 6
_LIGHT = ("#2f6fde", "#dd6b20", "#2f9e5b", "#8e4ec6", "#c2304f", "#5f6b7a")
_DARK = ("#6ea2ff", "#f59a57", "#5cc98a", "#bd8cf0", "#f0758f", "#a3afbd")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1360px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: .95rem; font-weight: 600; margin: 0 0 .3rem; }
p { margin: .1rem 0; } .soft { color: var(--soft); } a { color: var(--c0); }
.state { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; border: 1px solid var(--line);
         font-size: .85rem; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
summary { cursor: pointer; } pre { overflow-x: auto; font-size: .82rem; line-height: 1.4; }
"""


def document(title: str, body: str, *, style: str, head: str = "") -> str:
    """A whole page; `body`, `style` and `head` are markup already, `title` is text."""
    return "\n".join(
        [
            "<!doctype html><html lang=en><head><meta charset=utf-8>",
            "<meta name=viewport content='width=device-width, initial-scale=1'>",
            f"{head}<title>{html.escape(title)}</title><style>{_palette()}{_STYLE}{style}</style></head><body>",
            body,
            "</body></html>",
        ]
    )


def _palette() -> str:
    def variables(colors: Sequence[str]) -> str:
        return "".join(f"--c{index}: {color}; " for index, color in enumerate(colors))

    return (
        ":root { color-scheme: light dark; --ink: #1c2430; --paper: #f6f7f8; --card: #fff; --line: #d9dde2; "
        f"--soft: #66707c; {variables(_LIGHT)} }}\n"
        "@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --paper: #12161b; --card: #1a2027; "
        f"--line: #343c46; --soft: #97a2ae; {variables(_DARK)} }} }}\n"
    )
