"""Check by config.json whether an engine serves a model, without torch: launchers and the embedded engine call this."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_rloo.errors import ModelError, shown
from areal_rloo.models.folder import read_config
from areal_rloo.models.trainable import ROTARY_TYPES, SERVED_FAMILIES, rotary_options, tested

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")  # of the embedded engine
LAYER_TYPES = ("full_attention", "sliding_attention")
_LATER_GEMMA = ("gemma2", "gemma3_text")  # which name the activation differently


def check_served(key: str, folder: Path, engine: str) -> None:
    """Check that the engine has the logprobs of a model, as far as config.json tells.

    Raises:
        ModelError: the embedded engine does not serve the family or an option, SGLang would rotate more of each head
            than the model does, or config.json cannot be read.
    """
    config = read_config(key, folder)
    family = config.get("model_type")
    inner = config.get("rope_parameters")
    part = inner.get("partial_rotary_factor") if isinstance(inner, dict) else None
    if engine == "sglang" and family == "phi3" and part not in (None, 1, config.get("partial_rotary_factor")):
        raise ModelError(
            f"{key}: {folder}: partial_rotary_factor {shown(part)} is in rope_parameters of config.json alone, where "
            f'SGLang does not look: its logprobs would be wrong; add "partial_rotary_factor": {shown(part)} to the top '
            "level of config.json, or set rollout.engine=vllm"
        )
    if engine == "embedded":
        check_embedded(key, str(folder), config)


def check_embedded(key: str, path: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError if the embedded engine does not serve a model of this config.json, or of `to_dict()`.

    An option that config.json leaves out has the default of the family, which the engine serves.
    """
    family = config.get("model_type")
    if family not in SERVED_FAMILIES:
        raise ModelError(
            f"{key}: {path} is a {shown(family)} model, which the embedded engine does not serve; expected one of "
            f"{', '.join(SERVED_FAMILIES)}; take such a model{_or_a_server(config)}"
        )
    types = config.get("layer_types") or ()
    if isinstance(types, (list, tuple)) and (unknown := [kind for kind in types if kind not in LAYER_TYPES]):
        raise _refused(key, path, f"layers of type {shown(unknown[0])}; expected {' or '.join(LAYER_TYPES)}")
    activation = config.get("hidden_activation" if family in _LATER_GEMMA else "hidden_act")
    if activation is not None and activation not in ACTIVATIONS:
        raise _refused(key, path, f"activation {shown(activation)}; expected {' or '.join(ACTIVATIONS)}")
    for rotary in rotary_options(config):
        kind = rotary.get("rope_type", rotary.get("type", "default")) if isinstance(rotary, dict) else rotary
        if kind not in ROTARY_TYPES:
            raise _refused(
                key,
                path,
                f"rotary positions of type {shown(kind)} (rope_parameters or rope_scaling in config.json); expected "
                f"{', '.join(ROTARY_TYPES)}: with the others, the angles depend on the length of the row",
            )


def _or_a_server(config: Mapping[str, Any]) -> str:
    """Advise a server only for a family that the learner trains, as far as config.json tells."""
    if tested(config):
        return ", or a server for rollout.engine (sglang, vllm)"
    return "; a server (sglang, vllm) may serve it, but no test shows that the learner trains it: a start would try"


def _refused(key: str, path: str, has: str) -> ModelError:
    return ModelError(
        f"{key}: {path} has {has}; the embedded engine serves no other; take another model, or a server for "
        "rollout.engine (sglang, vllm)"
    )
