"""Algorithms by name: what `algorithm.preset` writes under the keys that the config file leaves out.

Each preset is RLOO plus or minus something, and sets every key that any preset sets, so that nothing of one is left
when another takes its place. docs/algorithms.md gives the equation and the source of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

PresetName = Literal[
    "rloo",
    "reinforce",
    "grpo",
    "dr_grpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo_areal",
    "rloo_verl",
    "rloo_trl",
    "rloo_ms_swift",
]

Tree = dict[str, Any]


def _norm(mean: str = "none", std: str = "none", **other: Any) -> Tree:
    return {
        "mean_level": mean,
        "mean_leave1out": False,
        "std_level": std,
        "std_unbiased": True,
        "over": "trajectories",
        "eps": 1e-6,
    } | other


_LEAVE_ONE_OUT = _norm("group", mean_leave1out=True)

_RLOO: Tree = {
    "reward_norm": _norm(),
    "returns": "trajectory",
    "discount": 1.0,
    "adv_norm": _LEAVE_ONE_OUT,
    "loss": {
        "kind": "ppo",
        "ratio_level": "token",
        "eps_low": 0.2,
        "eps_high": 0.2,
        "dual_clip": None,
        "aggregation": "token_mean",
    },
    "kl": {"coefficient": 0.0, "placement": "reward", "estimator": "k1"},
}


def _rloo_but(*, loss: Tree | None = None, kl: Tree | None = None, **other: Any) -> Tree:
    """RLOO with some keys set differently; sections `loss` and `kl` key by key."""
    return _RLOO | {"loss": _RLOO["loss"] | (loss or {}), "kl": _RLOO["kl"] | (kl or {})} | other


PRESETS: Mapping[PresetName, Tree] = {
    "rloo": _RLOO,
    "reinforce": _rloo_but(adv_norm=_norm(), loss={"kind": "reinforce"}),
    "grpo": _rloo_but(
        adv_norm=_norm("group", "group"),
        loss={"aggregation": "seq_mean_token_mean"},
        kl={"coefficient": 0.04, "placement": "loss", "estimator": "k3"},
    ),
    "dr_grpo": _rloo_but(adv_norm=_norm("group"), loss={"aggregation": "seq_mean_token_sum_norm"}),
    "reinforce_plus_plus": _rloo_but(
        returns="token",
        adv_norm=_norm("batch", "batch", over="tokens", eps=1e-8),
        kl={"coefficient": 0.01},
    ),
    "reinforce_plus_plus_baseline": _rloo_but(
        reward_norm=_norm("group"),
        adv_norm=_norm("none", "batch", over="tokens", eps=1e-8),
        kl={"coefficient": 1e-5, "placement": "loss", "estimator": "k2"},
    ),
    "rloo_areal": _rloo_but(loss={"aggregation": "seq_mean_token_mean"}),
    "rloo_verl": _rloo_but(loss={"dual_clip": 3.0}, kl={"coefficient": 0.001}),
    "rloo_trl": _rloo_but(
        loss={"ratio_level": "sequence_sum", "aggregation": "seq_mean_token_mean"}, kl={"coefficient": 0.05}
    ),
    "rloo_ms_swift": _rloo_but(loss={"aggregation": "seq_mean_token_mean"}, kl={"coefficient": 0.04}),
}


def expand(algorithm: Tree) -> Tree:
    """The section `algorithm` of a config file with its preset's values where it has none; the file's own win."""
    name = algorithm.get("preset", "rloo")
    preset = PRESETS.get(name) if isinstance(name, str) else None  # type: ignore[call-overload]
    return algorithm if preset is None else _filled(algorithm, preset)


def forget(algorithm: Tree) -> None:
    """Take out of a section `algorithm` every key that presets set, so that the next one has its way."""
    for *sections, key in _paths(_RLOO):
        node: Any = algorithm
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(key, None)


def _filled(own: Tree, preset: Tree) -> Tree:
    filled = dict(own)
    for key, value in preset.items():
        mine = own.get(key)
        if isinstance(value, dict) and (mine is None or isinstance(mine, dict)):
            filled[key] = _filled(mine or {}, value)
        elif key not in own:
            filled[key] = value
    return filled


def _paths(tree: Tree, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _paths(value, (*above, key))
        else:
            yield (*above, key)
