"""AReaL's spelling of `actor.adv_norm`, `actor.reward_norm` and `actor.rejection_sampling`, understood as ours.

A section of a file is read with AReaL's own defaults, since that is what its author meant; an override is one key.
"""

from __future__ import annotations

from typing import Any

_NORM_DEFAULTS = {"mean_level": "batch", "mean_leave1out": False, "std_level": "batch", "std_unbiased": True}
_NO_NORM = {"mean_level": "none", "mean_leave1out": False, "std_level": "none"}
_REJECTION_DEFAULTS = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0}

_SECTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    # in `actor`: our section, what an absent key means, what null in the section's place means
    "adv_norm": (("algorithm", "adv_norm"), _NORM_DEFAULTS | {"eps": 1e-5}, _NO_NORM),
    "reward_norm": (("algorithm", "reward_norm"), _NORM_DEFAULTS | {"eps": 1e-5}, _NO_NORM),
    "rejection_sampling": (("algorithm", "loss", "behaviour_weight"), _REJECTION_DEFAULTS, {"rule": "none"}),
}
_KEYS = {"action": "rule", "agg": "aggregate"}  # of rejection_sampling
_METRICS = {"kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}


def translate_file(tree: dict[str, Any]) -> None:
    """Move AReaL's sections of a config file to ours, in place; a key that stands in both is ours."""
    theirs, algorithm = tree.get("actor"), tree.get("algorithm")
    if not isinstance(theirs, dict) or not (algorithm is None or isinstance(algorithm, dict)):
        return  # the types are checked later, and said in our words
    for name in [name for name in _SECTIONS if name in theirs]:
        path, defaults, absent = _SECTIONS[name]
        section = theirs.pop(name)
        if section is None:
            moved = dict(absent)
        elif isinstance(section, dict):
            moved = {_KEYS.get(key, key): _value(key, value) for key, value in (defaults | section).items()}
        else:
            moved = section
        _move(tree, path, moved)
    if not theirs:
        del tree["actor"]


def translate_override(keys: tuple[str, ...], value: Any) -> tuple[tuple[str, ...], Any]:
    """The same override in our spelling; one that is not AReaL's as it is."""
    if len(keys) < 2 or keys[0] != "actor" or keys[1] not in _SECTIONS:
        return keys, value
    path, _, absent = _SECTIONS[keys[1]]
    if len(keys) == 2:
        return path, dict(absent) if value is None else value
    if keys[1] == "rejection_sampling":
        return (*path, _KEYS.get(keys[2], keys[2]), *keys[3:]), _value(keys[2], value)
    return (*path, *keys[2:]), value


def _value(key: str, value: Any) -> Any:
    return _METRICS.get(value, value) if key == "metric" and isinstance(value, str) else value


def _move(tree: dict[str, Any], path: tuple[str, ...], moved: Any) -> None:
    node = tree
    for key in path[:-1]:
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node = node[key]
    ours = node.get(path[-1])
    node[path[-1]] = moved | ours if isinstance(ours, dict) and isinstance(moved, dict) else moved
