"""Trajectories as a web page, trajectories.html: a list; each line opens to prompt, completion and tokens.

The page loads nothing. The embedded script (page.js) sorts, filters and shows single tokens; without scripts, the page
is a plain list. Of many records, the page shows a selection (`spread`).
"""

from __future__ import annotations

import base64
import hashlib
import html
import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from areal_rloo.files import write_atomically
from areal_rloo.inspect.select import PART, value_of
from areal_rloo.inspect.shown import NUM_COLORS, document, kept_ends, number, shortened, signed, visible, visible_line
from areal_rloo.telemetry.trajectories import Token, TrajectoryRecord

PAGE_NAME = "trajectories.html"
_MOST = 450
_MOST_BY_REASON = 20
_MOST_PROMPT = 8000  # characters
_MOST_TOKENS = 600_000  # of all completions on the page; a browser opens such a page in a second
_LEAST_TOKENS = 200  # of a completion
_MOST_END = 45  # characters at the end of a completion, shown in the closed line

# The keys of the script, and names in the head that differ.
_COLUMNS = ("version", "group", "source", "reward", "advantage", "staleness", "tokens", "finish_reason", "dropped", "")
_NAMES = {"group": "sample", "finish_reason": "finish", "": "how it ends"}
_STYLE = """
#tools { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; align-items: center; margin: .8rem 0 .4rem; }
#tools[hidden] { display: none; } #tools input[type=search] { flex: 1 1 22rem; font: inherit; color: inherit;
  background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .3rem .6rem; }
.list { overflow-x: auto; margin: .8rem 0; padding: 0; } .list > * { min-width: 1000px; }
.line { display: grid; gap: .8rem; padding: .22rem .8rem; font-variant-numeric: tabular-nums;
  grid-template-columns: 3rem 4.6rem 9rem 4.2rem 5.2rem 4.6rem 4rem 4.2rem 8rem 1fr; }
.line > span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.line > :nth-child(n+4):nth-child(-n+7), .line > :first-child { text-align: right; }
.head { font-size: .82rem; color: var(--soft); border-bottom: 1px solid var(--line); }
.head [role=button] { cursor: pointer; } .head [role=button]:hover { color: var(--ink); }
[aria-sort=descending]::after { content: " ↓"; } [aria-sort=ascending]::after { content: " ↑"; }
details.trajectory { border-bottom: 1px solid var(--line); } details.trajectory[hidden] { display: none; }
details.trajectory[open] > summary { background: var(--paper); } summary.line:hover { background: var(--paper); }
.inside { padding: .2rem .8rem .9rem 4.6rem; max-width: min(62rem, 100vw - 8rem); }
.inside h2 { margin: .7rem 0 .2rem; }
.inside pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: .85rem; line-height: 1.55; }
.facts { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; font-size: .85rem; }
.drop { color: var(--c4); } .gap { color: var(--soft); }
.key { padding: 0 .35rem; border-radius: 2px; }
.t { border-radius: 2px; } .t[title]:hover { outline: 1px solid var(--ink); }
.by-logprob .t.t { background: color-mix(in srgb, var(--c4) var(--surprise, 0%), transparent); }
.t.o, .by-logprob .t.o { font-style: italic; color: var(--soft); background: none;
  border-bottom: 2px dotted var(--soft); }
"""
_COLORS = "\n".join(
    f".t.v{n}, .key.v{n} {{ background: color-mix(in srgb, var(--c{n}) 24%, transparent) }}" for n in range(NUM_COLORS)
)
_TOOLS = """<div id=tools hidden><input type=search aria-label=filter
placeholder="reward&lt;0.5  tokens&gt;100  finish_reason=length  dropped=stale  group=40  any text">
<span>tokens by <label><input type=radio name=by value="" checked> version</label>
<label><input type=radio name=by value=by-logprob> logprob</label></span><span id=count class=soft></span></div>"""


_Numbered = tuple[int, TrajectoryRecord]


def write_page(folder: Path, records: Iterable[TrajectoryRecord]) -> Path:
    """Write the page into the run folder, and return the path of the page."""
    shown, num_records = spread(records, most=_MOST, most_by_reason=_MOST_BY_REASON)
    title = folder.resolve().name
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Only this script can run, and the page can load nothing, for any text in a completion.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = "".join(f"<span data-key='{key}'>{_NAMES.get(key, key)}</span>" for key in _COLUMNS)
    most = _MOST_TOKENS
    if sum(record.num_tokens for record in shown) > most:
        most = max(_LEAST_TOKENS, most // len(shown))
    body = [
        f"<h1>{html.escape(title)}: trajectories</h1><p>{_introduction(folder, len(shown), num_records)}</p>",
        _TOOLS,
        f"<section class=list><div class='line head'>{head}</div>",
        *(_row(record, most) for record in shown),
        f"</section><script>{script}</script>",
    ]
    meta = f'<meta http-equiv=Content-Security-Policy content="{policy}">'
    text = document(f"{title}: trajectories", "\n".join(body), style=_STYLE + _COLORS, head=meta)
    target = folder / PAGE_NAME
    write_atomically(target, text.encode())
    return target


def _introduction(folder: Path, num_shown: int, num_records: int) -> str:
    if not num_records:
        return "No trajectories yet."
    parts = [f"All {num_records:,} recorded trajectories; click a line to open it."]
    if num_shown < num_records:
        parts = [
            f"{num_shown:,} of the {num_records:,} recorded trajectories: whole groups, spread over the run, and some "
            "drops of each reason; click a line to open it. The other trajectories:",
            f"<code>areal-rloo inspect {html.escape(shlex.quote(str(folder)))}</code>.",
        ]
    if (folder / "report.html").is_file():
        parts.append("<a href='report.html'>report</a>")
    return " ".join(parts)


def _row(record: TrajectoryRecord, most: int) -> str:
    """Make a trajectory: a line of facts that opens to the text. The script sorts by the data- attributes."""
    source, finish_reason = visible_line(record.source), visible_line(record.finish_reason)
    dropped = None if record.dropped is None else visible_line(record.dropped)
    columns: dict[str, tuple[object, str]] = {  # the value for the script, and the text of the cell
        "version": (record.policy_version, str(record.policy_version)),
        "group": (record.group_id, record.name),
        "source": (source, f"{source}[{record.item_index}]"),
        "reward": (record.reward, "" if record.reward is None else number(record.reward)),
        "advantage": (record.advantage, "" if record.advantage is None else signed(record.advantage)),
        "staleness": (record.staleness, "" if record.staleness is None else str(record.staleness)),
        "tokens": (record.num_tokens, f"{record.num_tokens:,}"),
        "finish_reason": (finish_reason, finish_reason),
        "dropped": (dropped, dropped or ""),
        "": (None, visible_line(record.completion[-_MOST_END:])),
    }
    values = {key: value for key, (value, _) in columns.items() if key} | {"masked": record.num_masked_tokens}
    values |= {f"{PART}{visible_line(name)}": value for name, value in record.reward_parts.items()}
    line = "".join(f"<span>{html.escape(cell)}</span>" for _, cell in columns.values())
    attribute = html.escape(msgspec.json.encode(values).decode(), quote=True)
    return (
        f"<details class=trajectory data-values=\"{attribute}\"><summary class='line'>{line}</summary>"
        f"<div class=inside>{_inside(record, most)}</div></details>"
    )


def _inside(record: TrajectoryRecord, most: int) -> str:
    head, tail = kept_ends(record.num_tokens, most)
    tokens = list(record.tokens())
    first, last = tokens[:head], tokens[len(tokens) - tail :]
    num_left_out = len(tokens) - head - tail
    gap = f"<span class=gap> … {num_left_out:,} tokens … </span>" if num_left_out else ""
    parts = [f"<div class=facts>{_facts(record)}</div>"]
    if record.dropped is not None:
        detail = f"<pre class=drop>\n{_escaped(record.detail)}</pre>" if record.detail else ""
        parts.append(f"<h2 class=drop>dropped: {html.escape(visible_line(record.dropped))}</h2>{detail}")
    parts.append(f"<h2>prompt</h2><pre>\n{_escaped(shortened(record.prompt, _MOST_PROMPT))}</pre>")
    parts.append(f"<h2>completion</h2><pre class=completion>\n{_runs(first)}{gap}{_runs(last)}</pre>")
    if record.expected:
        parts.append(f"<h2>expected answer</h2><pre>\n{_escaped(record.expected)}</pre>")
    data = {
        "pieces": [visible(token.text) for token in first + last],
        "ids": [token.token_id for token in first + last],
        "logprobs": [round(token.logprob, 4) for token in first + last],
        "advantages": [round(token.advantage, 4) for token in first + last if token.advantage is not None],
        "runs": [[version, own, len(run)] for version, own, run in _grouped(first) + _grouped(last)],
        "gap": [head, num_left_out],
    }
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")  # so that no text can end the script
    return "".join(parts) + f"<script type='application/json'>{encoded}</script>"


def _facts(record: TrajectoryRecord) -> str:
    facts = [f"{visible_line(name)} {number(value)}" for name, value in record.reward_parts.items()]
    lowest, mean = value_of(record, "logprob_min"), value_of(record, "logprob_mean")
    if lowest is not None and mean is not None:
        facts.append(f"logprob {number(mean)} (min {number(lowest)})")
    if record.num_masked_tokens:
        facts.append(f"{record.num_masked_tokens:,} tokens past the staleness bound")
    facts.append(f"epoch {record.epoch}")
    if record.advantage is None and record.dropped is None:
        facts.append("not trained")
    keys = "".join(
        f"<span class='key v{version % NUM_COLORS}'>version {version}: {count:,} tokens</span>"
        for version, count in record.versions
    )
    return "".join(f"<span>{html.escape(fact)}</span>" for fact in facts) + keys


def _runs(tokens: Sequence[Token]) -> str:
    """Make the text, in runs of equal version and writer; the display without the script."""
    spans = []
    for version, own, run in _grouped(tokens):
        text = _escaped("".join(token.text for token in run))
        look, title = f"v{version % NUM_COLORS}", f"version {version}"
        if not own:
            look, title = "o", "not by the policy"
        spans.append(f"<span class='t {look}' title='{title}: {len(run):,} tokens'>{text}</span>")
    return "".join(spans)


def _grouped(tokens: Sequence[Token]) -> list[tuple[int, bool, list[Token]]]:
    groups = groupby(tokens, key=lambda token: (token.version, token.by_policy))
    return [(version, own, list(run)) for (version, own), run in groups]


def _escaped(text: str) -> str:
    return html.escape(visible(text))


def spread(
    records: Iterable[TrajectoryRecord], *, most: int, most_by_reason: int
) -> tuple[list[TrajectoryRecord], int]:
    """Select records in a single pass: at most `most` without a drop, and `most_by_reason` for each drop reason.

    Whole groups, spread evenly over the run, show advantages beside their siblings. Drops are rare, so some of each
    reason are kept. Return the records in file order, and the number of all records.
    """
    parts: dict[str | None, _Spread] = {None: _Spread(most)}  # by the reason of the drop
    num_records = 0
    for num_records, record in enumerate(records, start=1):
        parts.setdefault(record.dropped, _Spread(most_by_reason)).add(num_records, record)
    chosen = [pair for part in parts.values() for pair in part.kept()]
    return [record for _, record in sorted(chosen, key=lambda pair: pair[0])], num_records


class _Spread:
    """Keep every n-th group; double n whenever the groups have more than `most` records."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._every = 1
        self._ordinals: dict[int, int] = {}  # group id to order of arrival
        self._groups: dict[int, list[_Numbered]] = {}

    def add(self, number: int, record: TrajectoryRecord) -> None:
        ordinal = self._ordinals.setdefault(record.group_id, len(self._ordinals))
        if ordinal % self._every:
            return
        group = self._groups.setdefault(ordinal, [])
        if len(group) < self._most:  # also limit the size of a single group
            group.append((number, record))
        while len(self.kept()) > self._most:
            self._every *= 2
            self._groups = {ordinal: group for ordinal, group in self._groups.items() if ordinal % self._every == 0}

    def kept(self) -> list[_Numbered]:
        return [pair for group in self._groups.values() for pair in group]
