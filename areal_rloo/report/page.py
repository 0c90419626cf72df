"""From the records and the summary of a run to the text of its page: facts, charts, ledger, config."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from areal_rloo.inspect.look import NUM_COLORS, document
from areal_rloo.report.charts import Curve, line_chart, stacked_chart
from areal_rloo.telemetry.records import EvalRecord, TrainRecord

_Of = Callable[[str, str], Curve]  # a curve's name and the field of TrainRecord it shows
_MEAN_MAX = ("mean", "max")

_STYLE = """
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(185px, 1fr)); gap: .7rem; margin: 1.2rem 0; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.facts b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.facts span { font-size: .82rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 390px), 1fr)); gap: .8rem; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--line); stroke-width: .6; } .line { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
.unseen { fill: transparent; } circle:hover { fill: var(--ink); opacity: .5; }
.keys { font-size: .8rem; } .keys span { margin-right: .9rem; white-space: nowrap; }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin-right: .35rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td { padding: .15rem 1.6rem .15rem 0; } td + td { text-align: right; padding-right: 0; }
.below { display: grid; gap: .8rem; margin: .8rem 0; }
"""
_COLORS = "\n".join(
    f".line.c{n} {{ stroke: var(--c{n}) }} .area.c{n}, .dot.c{n} {{ fill: var(--c{n}) }} "
    f".key.c{n} {{ background: var(--c{n}) }}"
    for n in range(NUM_COLORS)
)


def page(
    title: str,
    config: str,
    train: Sequence[TrainRecord],
    evaluations: Sequence[EvalRecord],
    summary: Any | None,
    trajectories: str | None = None,
) -> str:
    """The whole page; `summary` is that of a run that has ended, `trajectories` names a page of them beside it."""
    state = "in progress" if summary is None else f"ended: {summary['exit_reason']}"
    link = f" <a href='{html.escape(trajectories, quote=True)}'>trajectories</a>" if trajectories else ""
    body = "\n".join(
        [
            f"<h1>{html.escape(title)}</h1><p><span class=state>{html.escape(state)}</span>{link}</p>",
            f"<div class=facts>{_facts(train, evaluations, summary)}</div>",
            f"<div class=charts>{''.join(_charts(train, evaluations))}</div>",
            f"<div class=below>{_ledger(train, summary)}<section><details><summary>Resolved config</summary>",
            f"<pre>{html.escape(config)}</pre></details></section></div>",
        ]
    )
    return document(title, body, style=_STYLE + _COLORS)


def _facts(train: Sequence[TrainRecord], evaluations: Sequence[EvalRecord], summary: Any | None) -> str:
    facts: list[tuple[str, str]] = []
    for name, records in _by_set(evaluations).items():
        what = "held-out accuracy" + (f", {html.escape(name)}" if len(_by_set(evaluations)) > 1 else "")
        facts.append((what, f"{records[0].accuracy:.3f} → {records[-1].accuracy:.3f}"))
        if records[-1].num_samples > 1:
            samples = f"pass@{records[-1].num_samples}, {html.escape(name)}"
            facts.append((samples, f"{records[0].pass_share:.3f} → {records[-1].pass_share:.3f}"))
    if train:
        last = train[-1]
        facts += [
            ("reward", f"{train[0].reward_mean:.3f} → {last.reward_mean:.3f}"),
            ("train steps", f"{last.num_train_steps:,}"),
            ("training time", _duration(last.wall_s)),
            ("learner idle", f"{100 * last.learner_idle_s / last.wall_s:.1f} %"),
            ("rollout idle, after the first step", f"{100 * last.rollout_idle_s / last.wall_s:.1f} %"),
            ("tokens generated", f"{last.generated_tokens:,}"),
        ]
    if summary is not None:
        staleness, times = summary["staleness"], summary["time_s"]
        facts += [
            ("tokens trained", f"{summary['tokens']['trained']:,}"),
            ("staleness, mean and max", f"{staleness['mean_trained']:.2f}, {staleness['max_trained']}"),
            ("tokens past the bound", f"{100 * staleness['masked_token_share']:.2f} %"),
            ("warm start", _duration(times["warm_start"])),
        ]
    return "".join(f"<div><b>{html.escape(value)}</b><span class=soft>{name}</span></div>" for name, value in facts)


def _charts(train: Sequence[TrainRecord], evaluations: Sequence[EvalRecord]) -> list[str]:
    fields = [msgspec.structs.asdict(record) for record in train]

    def of(name: str, key: str) -> Curve:
        return Curve(name, [(values["policy_version"], values[key]) for values in fields])

    return [
        *_evaluation_charts(evaluations),
        *_reward_charts(train),
        *_token_charts(train, of),
        *_policy_charts(train, of),
    ]


def _evaluation_charts(evaluations: Sequence[EvalRecord]) -> list[str]:
    """Accuracy, and where a set is sampled more than once pass@k and maj@k."""

    def of_sets(key: str) -> list[Curve]:
        return [
            Curve(name, [(record.policy_version, getattr(record, key)) for record in records])
            for name, records in _by_set(evaluations).items()
        ]

    charts = [line_chart("Held-out accuracy by policy version", of_sets("accuracy"), dots=True)]
    if any(record.num_samples > 1 for record in evaluations):
        charts += [
            line_chart("Prompts with a right sample: pass@k", of_sets("pass_share"), dots=True, share=True),
            line_chart("Prompts whose majority is right: maj@k", of_sets("majority_share"), dots=True, share=True),
        ]
    return charts


def _reward_charts(train: Sequence[TrainRecord]) -> list[str]:
    """The reward, and its parts and sources where there are several to tell apart."""
    reward = [(record.policy_version, record.reward_mean) for record in train]
    band = [(record.reward_mean - record.reward_std, record.reward_mean + record.reward_std) for record in train]
    charts = [line_chart("Reward of the batch", [Curve("mean", reward, band)], hint="band: one standard deviation")]
    for title, key in (
        ("Parts of the reward, before their weights", "reward_parts"),
        ("Reward by data source", "reward_by_source"),
    ):
        curves = _by_name(train, key)
        charts += [line_chart(title, curves)] if len(curves) > 1 else []
    return charts


def _by_name(train: Sequence[TrainRecord], key: str) -> list[Curve]:
    """A curve for each name in a field that has values by name."""
    names = sorted({name for record in train for name in getattr(record, key)})
    return [
        Curve(name, [(r.policy_version, getattr(r, key)[name]) for r in train if name in getattr(r, key)])
        for name in names
    ]


def _token_charts(train: Sequence[TrainRecord], of: _Of) -> list[str]:
    values = sorted({value for record in train for value in record.staleness_tokens})
    by_staleness = [Curve(str(value), [(r.policy_version, _share(r, value)) for r in train]) for value in values]
    shares = [
        of("groups of equal rewards", "zero_variance_group_share"),
        of("truncated completions", "truncated_share"),
        of("completions of several versions", "spanning_share"),
    ]
    return [
        line_chart("Staleness of trained tokens, in versions", [of(n, f"staleness_{n}") for n in _MEAN_MAX]),
        stacked_chart("Share of trained tokens by staleness", by_staleness),
        line_chart("Tokens past the bound, out of the loss (share)", [of("masked", "masked_token_share")]),
        line_chart("Completion length, in tokens", [of(n, f"completion_tokens_{n}") for n in _MEAN_MAX]),
        line_chart("Tokens per second", [of(n, f"{n}_tokens_per_s") for n in ("generated", "trained")]),
        line_chart("Shares of groups and completions", shares, share=True),
    ]


def _policy_charts(train: Sequence[TrainRecord], of: _Of) -> list[str]:
    return [
        line_chart("Ratio: current / proximal", [of(n, f"ratio_{n}") for n in _MEAN_MAX]),
        line_chart("behaviour_weight: proximal / behaviour", [of(n, f"behaviour_weight_{n}") for n in _MEAN_MAX]),
        line_chart(
            "Share of tokens clipped or limited",
            [
                of("ratio", "ratio_clipped_share"),
                of("behaviour_weight set to its bound", "behaviour_weight_clamped_share"),
                of("behaviour_weight masked", "behaviour_weight_masked_share"),
            ],
        ),
        line_chart(
            "KL in nats a token (k3)",
            [
                of("behaviour to current", "behaviour_kl_k3"),
                of("proximal to current", "proximal_kl_k3"),
                of("behaviour to reference", "reference_kl_k3"),
            ],
        ),
        line_chart(
            "Train-inference mismatch: |log behaviour - log proximal| at equal version",
            [of("mean", "mismatch_abs_mean"), of("max", "mismatch_max")],
        ),
        line_chart("Effective sample size, as a share", [of("share", "effective_sample_share")], share=True),
        line_chart("Entropy of the policy, in nats", [of("entropy", "entropy")]),
        line_chart("Gradient norm, before clipping", [of("norm", "gradient_norm")]),
        line_chart("Loss", [of("loss", "loss")]),
        line_chart("Seconds of a step, by what it does", _by_name(train, "times_s")),
        line_chart("Tokens forward and backward per second of training", [of("tokens/s", "learner_tokens_per_s")]),
        line_chart("Model FLOPs utilization (MFU)", [of("share", "model_flops_share")]),
        line_chart(
            "Idle seconds since the start", [of("learner", "learner_idle_s"), of("rollout, mean", "rollout_idle_s")]
        ),
    ]


def _by_set(evaluations: Sequence[EvalRecord]) -> dict[str, list[EvalRecord]]:
    """The evaluations of each held-out set, by version."""
    sets: dict[str, list[EvalRecord]] = {}
    for record in evaluations:
        sets.setdefault(record.name, []).append(record)
    return {name: sorted(records, key=lambda record: record.policy_version) for name, records in sets.items()}


def _share(record: TrainRecord, staleness: int) -> float:
    return record.staleness_tokens.get(staleness, 0) / max(1, sum(record.staleness_tokens.values()))


def _ledger(train: Sequence[TrainRecord], summary: Any | None) -> str:
    if summary is not None:
        counts = summary["ledger"]
    elif train:
        counts = msgspec.structs.asdict(train[-1].ledger)
    else:
        return ""
    rows = [(state.replace("_", " "), counts[state]) for state in ("admitted", "trained", "buffered", "in_flight")]
    rows += [(f"dropped: {reason}", count) for reason, count in sorted(counts["dropped"].items())]
    cells = "".join(f"<tr><td>{html.escape(name)}<td>{count:,}" for name, count in rows)
    return f"<section><h2>Ledger, in samples</h2><table>{cells}</table></section>"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
