"""Translate AReaL's `actor.adv_norm`, `actor.reward_norm` and `actor.rejection_sampling` to our keys.

A whole section gets AReaL's defaults, because the author of the section meant these. An override of a single key
changes only this key. As in AReaL's code, `reward_norm` is over trajectories, and `adv_norm` over tokens; but with
`mean_leave1out`, `adv_norm` is over trajectories, as in AReaL's documents: RLOO. AReaL cuts a batch into groups by
`group_size`, which becomes `algorithm.group_size`; our groups have ids.
"""

from __future__ import annotations

from typing import Any

from areal_rloo.errors import ConfigError

_NO_NORM = {"mean_level": "none", "mean_leave1out": False, "std_level": "none"}
_BATCH_LEVELS = {"mean_level": "batch", "mean_leave1out": False, "std_level": "batch"}
_NORM_DEFAULTS = _BATCH_LEVELS | {"std_unbiased": True, "over": "trajectories", "eps": 1e-5}
_RULE_DEFAULTS = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "lower": None, "upper": 5.0}

_SECTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    # key in `actor`: path of our section, defaults of absent keys, meaning of null in place of the section
    "adv_norm": (("algorithm", "adv_norm"), _NORM_DEFAULTS, _NO_NORM),
    "reward_norm": (("algorithm", "reward_norm"), _NORM_DEFAULTS, _NO_NORM),
    "rejection_sampling": (("algorithm", "loss", "behaviour_weight"), _RULE_DEFAULTS, {"rule": "none"}),
}
_KEYS = {"action": "rule", "agg": "aggregate"}  # of rejection_sampling
_METRICS = {"kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}


def translate_file(tree: dict[str, Any]) -> None:
    """Move AReaL's sections of a config file to our sections, in place. Keys in our sections win.

    Raises:
        ConfigError: a norm's `group_size` differs from `algorithm.group_size`.
    """
    theirs, algorithm = tree.get("actor"), tree.get("algorithm")
    if not isinstance(theirs, dict) or not (algorithm is None or isinstance(algorithm, dict)):
        return  # a later check of types reports the error in our words
    for name in [name for name in _SECTIONS if name in theirs]:
        moved = _section(name, theirs.pop(name), tree)
        path = _SECTIONS[name][0]
        node = _node(tree, path[:-1])
        ours = node.get(path[-1])
        node[path[-1]] = moved | ours if isinstance(ours, dict) and isinstance(moved, dict) else moved
    if not theirs:
        del tree["actor"]


def translate_override(keys: tuple[str, ...], value: Any, tree: dict[str, Any]) -> tuple[tuple[str, ...], Any]:
    """Translate an override to our spelling; return other overrides unchanged. `tree`: the config to override.

    Raises:
        ConfigError: as `translate_file`.
    """
    if len(keys) < 2 or keys[0] != "actor" or keys[1] not in _SECTIONS:
        return keys, value
    path = _SECTIONS[keys[1]][0]
    if len(keys) == 2:
        return path, _section(keys[1], value, tree)
    if keys[1] == "rejection_sampling":
        return (*path, _KEYS.get(keys[2], keys[2]), *keys[3:]), _value(keys[2], value)
    if keys[2:] == ("group_size",):
        return ("algorithm", "group_size"), value
    return (*path, *keys[2:]), value


def _section(name: str, section: Any, tree: dict[str, Any]) -> Any:
    """Translate a whole section, and fill absent keys with AReaL's defaults."""
    _, defaults, absent = _SECTIONS[name]
    if section is None:
        return dict(absent)
    if not isinstance(section, dict):
        return section
    section = dict(section)
    if "norm" in name:
        _take_group_size(name, section.pop("group_size", None), tree)
    if name == "adv_norm" and not section.get("mean_leave1out"):
        section.setdefault("over", "tokens")
    return {_KEYS.get(key, key): _value(key, value) for key, value in (defaults | section).items()}


def _take_group_size(name: str, size: Any, tree: dict[str, Any]) -> None:
    if size is None or (isinstance(size, str) and size.startswith("${")):
        return  # AReaL's interpolation of another option; `algorithm.group_size` decides
    algorithm = _node(tree, ("algorithm",))
    if algorithm.setdefault("group_size", size) != size:
        raise ConfigError(
            f"actor.{name}.group_size: expected algorithm.group_size={algorithm['group_size']}, got {size}; a run has "
            "a single group size; leave this key out"
        )


def _value(key: str, value: Any) -> Any:
    return _METRICS.get(value, value) if key == "metric" and isinstance(value, str) else value


def _node(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return the section at a path; make missing sections."""
    for key in path:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    return tree
