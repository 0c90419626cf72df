"""The model families that the engine serves: a transformers config becomes the switches of the forward pass.

A family is an entry of `FAMILIES`: the switches that differ from the defaults of `Architecture`, which are Llama's.
`transformer.py` reads switches only, `parameters.py` also the names of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from areal_rloo.errors import ModelError, shown
from areal_rloo.models.files import reading_model
from areal_rloo.models.served import check_embedded
from areal_rloo.models.sizes import Sizes
from areal_rloo.models.trainable import ROTARY_TYPES

Switches = dict[str, Any]
Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


class Norms(NamedTuple):
    """The names of a layer's norms before and after attention, and before and after the MLP; None: no norm."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


class Rotary(NamedTuple):
    """A rotary embedding of some layers."""

    parameters: Mapping[str, Any] | None  # as in config.json; None: no rotation
    layer_type: str | None = None  # of the parameters in config.json, if they differ by type of layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(Sizes):
    """The sizes of a checkpoint, the switches of the forward pass, and the names of tensors that differ."""

    norm_eps: float
    activation: Activation
    attention_scale: float  # of the products of queries and keys
    windows: tuple[int | None, ...]  # by layer: a token attends to this number of tokens, itself included; None: to all
    norms: Norms
    rotary: tuple[Rotary, ...]
    rotations: tuple[int, ...]  # by layer: index in `rotary`
    rotary_dim: int  # the first numbers of a head, which are rotated
    interleaved: bool = False  # rotated in pairs of neighbours, else number i with number i + rotary_dim / 2
    norm_offset: float = 0.0  # added to the weights of norms
    qk_norm: Literal["heads", "projections"] | None = None  # over each head, or over all heads together
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False  # the checkpoint has a single tensor `qkv_proj`
    fused_gate_up: bool = False  # the checkpoint has a single tensor `gate_up_proj`
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and MLP
    logit_scale: float = 1.0
    attention_cap: float | None = None  # a score s becomes cap tanh(s / cap)
    logit_cap: float | None = None

    @classmethod
    def of_config(cls, config: PretrainedConfig, path: Path) -> Architecture:
        """Read a transformers config; raises ModelError if the engine does not support the model."""
        given: Mapping[str, Any] = config.to_dict()
        check_embedded("model.path", str(path), given)
        sizes = Sizes.of(given)
        if sizes is None:
            raise ModelError(f"{path}: config.json lacks a size, such as hidden_size; download the model again")
        if given.get("use_bidirectional_attention"):
            raise _refused(path, "has use_bidirectional_attention; expected causal attention")
        switches: Switches = {
            "norm_eps": config.rms_norm_eps,
            "hidden_act": given.get("hidden_act"),
            "attention_scale": sizes.head_dim**-0.5,
            "windows": (None,) * sizes.num_layers,
            "norms": Norms(),
            "rotary": (Rotary(config.rope_parameters),),
            "rotations": (0,) * sizes.num_layers,
            "rotary_dim": sizes.head_dim,
        }
        with reading_model(str(path)):
            switches |= FAMILIES[config.model_type](config)
        activation = switches.pop("hidden_act")
        if activation not in _ACTIVATIONS:
            raise _refused(path, f"has activation {shown(activation)}; expected {' or '.join(_ACTIVATIONS)}")
        _check_rotary(path, switches)
        return cls(**asdict(sizes) | {"kept": sizes.kept}, **switches, activation=_ACTIVATIONS[activation])


def _refused(path: Path, reason: str) -> ModelError:
    return ModelError(f"model.path: {path} {reason}; take another model")


def _check_rotary(path: Path, switches: Switches) -> None:
    for parameters in (rotary.parameters for rotary in switches["rotary"] if rotary.parameters is not None):
        by_type = any(isinstance(value, dict) for value in parameters.values())
        kind = parameters if by_type else parameters.get("rope_type", "default")
        if kind not in ROTARY_TYPES:
            raise _refused(
                path,
                f"has rotary positions of type {shown(kind)} (rope_parameters or rope_scaling in config.json); "
                f"expected {', '.join(ROTARY_TYPES)}: with the others, the angles depend on the length of the row",
            )
    if switches["rotary_dim"] % 2:
        raise _refused(path, f"rotates {switches['rotary_dim']} numbers of a head; expected an even number")


def _rotary_by_type(config: Any) -> Switches:
    kinds = list(dict.fromkeys(config.layer_types))
    return {
        "rotary": tuple(Rotary(config.rope_parameters[kind], kind) for kind in kinds),
        "rotations": tuple(kinds.index(kind) for kind in config.layer_types),
    }


def _window_in_all_layers(config: Any) -> Switches:
    return {"windows": (config.sliding_window,) * config.num_hidden_layers}


def _windows_by_type(config: Any) -> Switches:
    windows = (config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)
    return {"windows": tuple(windows)}


def _attention_bias(config: Any) -> Switches:
    return {"qkv_bias": config.attention_bias, "output_bias": config.attention_bias}


def _biases(config: Any) -> Switches:
    return _attention_bias(config) | {"mlp_bias": config.mlp_bias}


def _partly_rotated(config: Any) -> Switches:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"rotary_dim": int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))}


def _gemma(config: Any) -> Switches:
    return _attention_bias(config) | {"norm_offset": 1.0, "embedding_scale": config.hidden_size**0.5}


def _later_gemma(config: Any) -> Switches:
    norms = Norms(
        attention_output="post_attention_layernorm",
        mlp_input="pre_feedforward_layernorm",
        mlp_output="post_feedforward_layernorm",
    )
    return {
        **_gemma(config),
        **_windows_by_type(config),
        "hidden_act": config.hidden_activation,
        "norms": norms,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "logit_cap": config.final_logit_softcapping,
    }


def _olmo(config: Any) -> Switches:
    norms = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    return _attention_bias(config) | {"norms": norms, "qk_norm": "projections"}


def _smollm(config: Any) -> Switches:
    return {
        **_biases(config),
        **_windows_by_type(config),
        "rotary": (Rotary(config.rope_parameters), Rotary(None)),
        "rotations": tuple(0 if rotated else 1 for rotated in config.no_rope_layers),
    }


def _granite(config: Any) -> Switches:
    return _biases(config) | {
        "embedding_scale": config.embedding_multiplier,
        "attention_scale": config.attention_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logits_scaling,
    }


def _phi(config: Any) -> Switches:
    return _window_in_all_layers(config) | _partly_rotated(config) | {"fused_qkv": True, "fused_gate_up": True}


def _glm(config: Any) -> Switches:
    return _partly_rotated(config) | {
        "qkv_bias": config.attention_bias,
        "fused_gate_up": True,
        "interleaved": True,
    }


_GLM4_NORMS = Norms(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm")

FAMILIES: dict[str, Callable[[Any], Switches]] = {
    "qwen2": lambda config: _windows_by_type(config) | {"qkv_bias": True},
    "qwen3": lambda config: _windows_by_type(config) | _attention_bias(config) | {"qk_norm": "heads"},
    "llama": _biases,
    "mistral": _window_in_all_layers,
    "ministral": _windows_by_type,
    "gemma": _gemma,
    "gemma2": lambda config: _later_gemma(config) | {"attention_cap": config.attn_logit_softcapping},
    "gemma3_text": lambda config: _later_gemma(config) | _rotary_by_type(config) | {"qk_norm": "heads"},
    "phi3": _phi,
    "olmo2": _olmo,
    "olmo3": lambda config: _olmo(config) | _windows_by_type(config) | _rotary_by_type(config),
    "smollm3": _smollm,
    "granite": _granite,
    "glm": _glm,
    "glm4": lambda config: _glm(config) | {"norms": _GLM4_NORMS},
}
"""By `model_type`, the switches of a config; tests/unit compare the logprobs of each family with transformers'."""
