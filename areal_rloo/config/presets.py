"""Algorithms by name: the values that `algorithm.preset` gives to keys absent from the config file.

Each preset is RLOO with some changes. All presets set the same keys, so a preset fully replaces another preset.
docs/algorithms.md gives the equation and the source of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from areal_rloo.config.algorithm import AlgorithmConfig, NormConfig, PresetName
from areal_rloo.config.section import Section

Tree = dict[str, Any]


def _norm(**changes: Any) -> Tree:
    return _section(NormConfig(**changes), *NormConfig.__struct_fields__)


def _section(section: Section, *keys: str) -> Tree:
    return {key: msgspec.to_builtins(getattr(section, key)) for key in keys}


_DEFAULTS = AlgorithmConfig()  # RLOO
_RLOO: Tree = {
    **_section(_DEFAULTS, "reward_norm", "returns", "discount", "adv_norm"),
    "loss": _section(
        _DEFAULTS.loss, "kind", "ratio_level", "eps_low", "eps_high", "dual_clip", "aggregation", "count_masked"
    ),
    "kl": _section(_DEFAULTS.kl, "coefficient", "placement", "estimator", "correction"),
}


def _rloo_but(*, loss: Tree | None = None, kl: Tree | None = None, **other: Any) -> Tree:
    """Change some keys of RLOO; the sections `loss` and `kl` merge key by key."""
    return _RLOO | {"loss": _RLOO["loss"] | (loss or {}), "kl": _RLOO["kl"] | (kl or {})} | other


PRESETS: Mapping[PresetName, Tree] = {
    "rloo": _RLOO,
    "reinforce": _rloo_but(adv_norm=_norm(), loss={"kind": "reinforce"}),
    "grpo": _rloo_but(
        adv_norm=_norm(mean_level="group", std_level="group"),
        loss={"aggregation": "seq_mean_token_mean"},
        kl={"coefficient": 0.04, "placement": "loss", "estimator": "k3"},
    ),
    "dr_grpo": _rloo_but(adv_norm=_norm(mean_level="group"), loss={"aggregation": "seq_mean_token_sum_norm"}),
    "reinforce_plus_plus": _rloo_but(
        returns="token",
        adv_norm=_norm(mean_level="batch", std_level="batch", over="tokens", eps=1e-8),
        kl={"coefficient": 0.01},
    ),
    "reinforce_plus_plus_baseline": _rloo_but(
        reward_norm=_norm(mean_level="group"),
        adv_norm=_norm(std_level="batch", over="tokens", eps=1e-8),
        kl={"coefficient": 1e-5, "placement": "loss", "estimator": "k2"},
    ),
    "rloo_areal": _rloo_but(loss={"aggregation": "seq_mean_token_mean"}),
    "rloo_verl": _rloo_but(loss={"dual_clip": 3.0}, kl={"coefficient": 0.001}),
    "rloo_trl": _rloo_but(
        loss={"ratio_level": "sequence_sum", "aggregation": "seq_mean_token_mean", "count_masked": True},
        kl={"coefficient": 0.05},
    ),
    "rloo_ms_swift": _rloo_but(
        loss={"aggregation": "seq_mean_token_mean", "count_masked": True}, kl={"coefficient": 0.04}
    ),
}


def expand(algorithm: Tree) -> Tree:
    """Fill absent keys of the section `algorithm` from the preset; keys of the file win."""
    name = algorithm.get("preset", "rloo")
    preset = PRESETS.get(name) if isinstance(name, str) else None  # type: ignore[call-overload]
    return algorithm if preset is None else _filled(algorithm, preset)


def forget(algorithm: Tree, preset: Tree = _RLOO) -> None:
    """Remove every key that presets set from a section `algorithm`, so another preset can set all of them."""
    for key, value in preset.items():
        if not isinstance(value, dict):
            algorithm.pop(key, None)
        elif isinstance(algorithm.get(key), dict):
            forget(algorithm[key], value)


def _filled(own: Tree, preset: Tree) -> Tree:
    filled = dict(own)
    for key, value in preset.items():
        mine = own.get(key)
        if isinstance(value, dict) and (mine is None or isinstance(mine, dict)):
            filled[key] = _filled(mine or {}, value)
        elif key not in own:
            filled[key] = value
    return filled
