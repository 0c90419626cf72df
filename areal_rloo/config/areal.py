"""AReaL's spelling of `actor.adv_norm`, `actor.reward_norm` and `actor.rejection_sampling`, understood as ours.

A whole section is read with AReaL's own defaults, since that is what its author meant; an override of one key is one
key. Norms are over trajectories, as AReaL's documents describe them. Its `group_size`, by which it cuts a batch into
groups, is ours of the same name: our groups are known by id.
"""

from __future__ import annotations

from typing import Any

from areal_rloo.errors import ConfigError

_NORM_DEFAULTS = {
    "mean_level": "batch",
    "mean_leave1out": False,
    "std_level": "batch",
    "std_unbiased": True,
    "over": "trajectories",
    "eps": 1e-5,
}
_NO_NORM = {"mean_level": "none", "mean_leave1out": False, "std_level": "none"}
_REJECTION_DEFAULTS = {
    "level": "token",
    "action": "mask",
    "metric": "ratio",
    "agg": "mean",
    "lower": None,
    "upper": 5.0,
}

_SECTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    # in `actor`: our section, what an absent key means, what null in the section's place means
    "adv_norm": (("algorithm", "adv_norm"), _NORM_DEFAULTS, _NO_NORM),
    "reward_norm": (("algorithm", "reward_norm"), _NORM_DEFAULTS, _NO_NORM),
    "rejection_sampling": (("algorithm", "loss", "behaviour_weight"), _REJECTION_DEFAULTS, {"rule": "none"}),
}
_KEYS = {"action": "rule", "agg": "aggregate"}  # of rejection_sampling
_METRICS = {"kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}


def translate_file(tree: dict[str, Any]) -> None:
    """Move AReaL's sections of a config file to ours, in place; a key that stands in both is ours.

    Raises:
        ConfigError: a norm's `group_size` is another than `algorithm.group_size`.
    """
    theirs, algorithm = tree.get("actor"), tree.get("algorithm")
    if not isinstance(theirs, dict) or not (algorithm is None or isinstance(algorithm, dict)):
        return  # the types are checked later, and said in our words
    for name in [name for name in _SECTIONS if name in theirs]:
        moved = _section(name, theirs.pop(name), tree)
        path = _SECTIONS[name][0]
        node = _node(tree, path[:-1])
        ours = node.get(path[-1])
        node[path[-1]] = moved | ours if isinstance(ours, dict) and isinstance(moved, dict) else moved
    if not theirs:
        del tree["actor"]


def translate_override(keys: tuple[str, ...], value: Any, tree: dict[str, Any]) -> tuple[tuple[str, ...], Any]:
    """The same override in our spelling; one that is not AReaL's as it is. `tree` is the config it will be laid on.

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
    """A whole section in our words, with AReaL's defaults for what it leaves out."""
    _, defaults, absent = _SECTIONS[name]
    if section is None:
        return dict(absent)
    if not isinstance(section, dict):
        return section
    section = dict(section)
    if "norm" in name:
        _take_group_size(name, section.pop("group_size", None), tree)
    return {_KEYS.get(key, key): _value(key, value) for key, value in (defaults | section).items()}


def _take_group_size(name: str, size: Any, tree: dict[str, Any]) -> None:
    if size is None or (isinstance(size, str) and size.startswith("${")):
        return  # an interpolation of theirs; the group size is said elsewhere
    algorithm = _node(tree, ("algorithm",))
    if algorithm.setdefault("group_size", size) != size:
        raise ConfigError(
            f"actor.{name}.group_size: expected algorithm.group_size={algorithm['group_size']}, got {size}; groups are "
            "known by id here, so there is one size; leave this one out"
        )


def _value(key: str, value: Any) -> Any:
    return _METRICS.get(value, value) if key == "metric" and isinstance(value, str) else value


def _node(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The section at a path, made where there is none."""
    node = tree
    for key in path:
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node = node[key]
    return node
