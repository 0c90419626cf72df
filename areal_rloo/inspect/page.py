"""Trajectories as one page, trajectories.html: a list that opens to prompt, completion and what is known of each token.

Nothing is loaded from anywhere. Without its script (page.js, written into it) the page is a plain list; with it, it
sorts and filters, and shows each token.
"""

from __future__ import annotations

import base64
import hashlib
import html
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from areal_rloo.inspect.look import NUM_COLORS, document
from areal_rloo.inspect.sample import spread
from areal_rloo.inspect.select import PART, value_of
from areal_rloo.inspect.shown import kept_ends, number, shortened, signed, visible, visible_line
from areal_rloo.telemetry.trajectories import Token, TrajectoryRecord

PAGE_NAME = "trajectories.html"
_MOST = 450
_MOST_BY_REASON = 20
_MOST_PROMPT = 8000  # characters
_MOST_TOKENS = 600_000  # of all completions on the page; a browser opens that in a second
_LEAST_TOKENS = 200  # of one completion
_MOST_END = 45  # characters of a completion that fit into its line

_COLUMNS = {
    "step": "step",
    "group": "sample",
    "source": "source",
    "reward": "reward",
    "advantage": "advantage",
    "staleness": "staleness",
    "tokens": "tokens",
    "finish_reason": "finish",
    "dropped": "dropped",
    "": "how it ends",
}
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


def write_page(folder: Path, records: Iterable[TrajectoryRecord]) -> Path:
    """Write the page of a run into its folder and give its path; of many records it shows a selection."""
    shown, num_records = spread(records, most=_MOST, most_by_reason=_MOST_BY_REASON)
    title = folder.resolve().name
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Whatever a completion says: this script alone runs, and nothing is fetched.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    body = [
        f"<h1>{html.escape(title)}: trajectories</h1><p>{_introduction(folder, len(shown), num_records)}</p>",
        _TOOLS,
        f"<section class=list><div class='line head'>{_head()}</div>",
        *_rows(shown),
        f"</section><script>{script}</script>",
    ]
    target = folder / PAGE_NAME
    target.write_text(
        document(
            f"{title}: trajectories",
            "\n".join(body),
            style=_STYLE + _COLORS,
            head=f'<meta http-equiv=Content-Security-Policy content="{policy}">',
        ),
        encoding="utf-8",
    )
    return target


def _introduction(folder: Path, num_shown: int, num_records: int) -> str:
    if not num_records:
        return "No trajectories yet."
    parts = [f"All {num_records:,} that were recorded; each line opens."]
    if num_shown < num_records:
        parts = [
            f"{num_shown:,} of the {num_records:,} that were recorded: whole groups, spread over the run, and some of "
            "each reason of drops; each line opens. The others are behind",
            f"<code>python -m areal_rloo.inspect {html.escape(shlex.quote(str(folder)))}</code>.",
        ]
    if (folder / "report.html").is_file():
        parts.append("<a href='report.html'>report</a>")
    return " ".join(parts)


def _head() -> str:
    return "".join(f"<span data-key='{key}'>{name}</span>" for key, name in _COLUMNS.items())


def _rows(records: Sequence[TrajectoryRecord]) -> Iterator[str]:
    most = max(_LEAST_TOKENS, _MOST_TOKENS // max(1, len(records)))
    if sum(record.num_tokens for record in records) <= _MOST_TOKENS:
        most = _MOST_TOKENS
    for record in records:
        yield _row(record, most)


def _row(record: TrajectoryRecord, most: int) -> str:
    """One trajectory: a line of facts that opens to its text; data- attributes are what the script sorts by."""
    values = {
        "step": record.policy_version,
        "group": record.group_id,
        "source": visible_line(record.source),
        "reward": record.reward,
        "advantage": record.advantage,
        "staleness": record.staleness,
        "tokens": record.num_tokens,
        "masked": record.num_masked_tokens,
        "finish_reason": visible_line(record.finish_reason),
        "dropped": None if record.dropped is None else visible_line(record.dropped),
        **{f"{PART}{visible_line(name)}": value for name, value in record.reward_parts.items()},
    }
    cells = (
        str(record.policy_version),
        record.name,
        f"{visible_line(record.source)}[{record.item_index}]",
        "" if record.reward is None else number(record.reward),
        "" if record.advantage is None else signed(record.advantage),
        "" if record.staleness is None else str(record.staleness),
        f"{record.num_tokens:,}",
        visible_line(record.finish_reason),
        visible_line(record.dropped or ""),
        visible_line(record.completion[-_MOST_END:]),
    )
    line = "".join(f"<span>{html.escape(cell)}</span>" for cell in cells)
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
    data = {
        "pieces": [visible(token.text) for token in first + last],
        "ids": [token.token_id for token in first + last],
        "logprobs": [round(token.logprob, 4) for token in first + last],
        "advantages": [round(token.advantage, 4) for token in first + last if token.advantage is not None],
        "runs": [[version, own, len(run)] for version, own, run in _grouped(first) + _grouped(last)],
        "gap": [head, num_left_out],
    }
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")  # no end of the script in it
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
    """The text in runs of one version and one writer: what there is without the script."""
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
