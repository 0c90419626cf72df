"""A checkpoint as this engine holds it: its architecture, and its weights with projections fused.

In: a Hugging Face folder (Qwen2, Qwen3, Llama). Out: tensors that `transformer.py` multiplies with. New weights come by
Hugging Face name and are checked whole before the first is copied.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_rloo.errors import EngineError, ModelError
from areal_rloo.models.layout import head_dim

SUPPORTED = ("qwen2", "qwen3", "llama")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length
_WAY_OUT = "use rollout.engine=sglang"


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shapes and switches of a checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool

    @classmethod
    def of_config(cls, config: PretrainedConfig, path: Path) -> Architecture:
        """Read a transformers config.

        Raises:
            ModelError: this engine cannot serve it; says why.
        """
        if config.model_type not in SUPPORTED:
            raise ModelError(
                f"{path}: architecture {config.model_type!r} is not served by the embedded engine, which knows "
                f"{', '.join(SUPPORTED)}; {_WAY_OUT}"
            )
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ModelError(f"{path}: sliding-window attention is not served by the embedded engine; {_WAY_OUT}")
        if config.hidden_act != "silu":
            raise ModelError(f"{path}: activation {config.hidden_act!r} is not served, expected 'silu'; {_WAY_OUT}")
        heads = config.num_attention_heads
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads or heads,
            head_dim=head_dim(config),
            norm_eps=config.rms_norm_eps,
            qkv_bias=config.model_type == "qwen2" or attention_bias,
            output_bias=config.model_type != "qwen2" and attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=config.model_type == "qwen3",
            tied=bool(config.tie_word_embeddings),
        )


@dataclass(slots=True)
class Layer:
    """One decoder layer; weight matrices are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Parameters:
    """All weights of a model, and where each Hugging Face parameter lies in them."""

    def __init__(self, architecture: Architecture, *, device: torch.device, dtype: torch.dtype) -> None:
        a = self.architecture = architecture
        heads, kv, dim = a.num_heads, a.num_kv_heads, a.head_dim

        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype)

        def empty_norm(*shape: int) -> Tensor:  # float32, as the learner's under autocast
            return torch.empty(*shape, device=device, dtype=torch.float32)

        self.norm_eps = torch.tensor(a.norm_eps, device=device)
        self.embedding = empty(a.vocab_size, a.hidden_size)
        self.final_norm = empty_norm(a.hidden_size)
        self.head = self.embedding if a.tied else empty(a.vocab_size, a.hidden_size)
        self.layers = [
            Layer(
                input_norm=empty_norm(a.hidden_size),
                qkv=empty((heads + 2 * kv) * dim, a.hidden_size),
                qkv_bias=empty((heads + 2 * kv) * dim) if a.qkv_bias else None,
                qk_norm=empty_norm(heads + kv, dim) if a.qk_norm else None,
                output=empty(a.hidden_size, heads * dim),
                output_bias=empty(a.hidden_size) if a.output_bias else None,
                mlp_norm=empty_norm(a.hidden_size),
                gate_up=empty(2 * a.intermediate_size, a.hidden_size),
                gate_up_bias=empty(2 * a.intermediate_size) if a.mlp_bias else None,
                down=empty(a.hidden_size, a.intermediate_size),
                down_bias=empty(a.hidden_size) if a.mlp_bias else None,
            )
            for _ in range(a.num_layers)
        ]
        self._places = dict(self._named_places())

    def fitting(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """New weights by Hugging Face name, if all of them fit.

        Raises:
            EngineError: a name is unknown or missing, or a shape differs.
        """
        given = dict(weights)
        if self.architecture.tied:
            given.pop("lm_head.weight", None)
        unknown, missing = given.keys() - self._places.keys(), self._places.keys() - given.keys()
        if unknown or missing:
            raise EngineError(
                f"weights do not fit the model: unknown {sorted(unknown)[:3]}, missing {sorted(missing)[:3]}"
            )
        for name, tensor in given.items():
            place = self._places[name]
            expected = place.shape[1:] if name.endswith(("q_norm.weight", "k_norm.weight")) else place.shape
            if tensor.shape != expected:
                raise EngineError(f"weights: {name}: expected shape {tuple(expected)}, got {tuple(tensor.shape)}")
        return given

    def copy_from(self, fitting: dict[str, Tensor]) -> None:
        """Take weights that `fitting` gave."""
        for name, tensor in fitting.items():
            self._places[name].copy_(tensor)

    def clone(self) -> Parameters:
        """A private copy."""
        copy = Parameters(self.architecture, device=self.embedding.device, dtype=self.embedding.dtype)
        for name, place in self._places.items():
            copy._places[name].copy_(place)
        return copy

    def _named_places(self) -> Iterator[tuple[str, Tensor]]:
        a = self.architecture
        yield "model.embed_tokens.weight", self.embedding
        yield "model.norm.weight", self.final_norm
        if not a.tied:
            yield "lm_head.weight", self.head
        sizes = [a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim]
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            yield prefix + "input_layernorm.weight", layer.input_norm
            yield prefix + "post_attention_layernorm.weight", layer.mlp_norm
            for letter, place in zip("qkv", layer.qkv.split(sizes), strict=True):
                yield f"{prefix}self_attn.{letter}_proj.weight", place
            if layer.qkv_bias is not None:
                for letter, place in zip("qkv", layer.qkv_bias.split(sizes), strict=True):
                    yield f"{prefix}self_attn.{letter}_proj.bias", place
            if layer.qk_norm is not None:
                yield prefix + "self_attn.q_norm.weight", layer.qk_norm[: a.num_heads]
                yield prefix + "self_attn.k_norm.weight", layer.qk_norm[a.num_heads :]
            yield prefix + "self_attn.o_proj.weight", layer.output
            if layer.output_bias is not None:
                yield prefix + "self_attn.o_proj.bias", layer.output_bias
            gate, up = layer.gate_up.chunk(2)
            yield prefix + "mlp.gate_proj.weight", gate
            yield prefix + "mlp.up_proj.weight", up
            yield prefix + "mlp.down_proj.weight", layer.down
            if layer.gate_up_bias is not None and layer.down_bias is not None:
                gate, up = layer.gate_up_bias.chunk(2)
                yield prefix + "mlp.gate_proj.bias", gate
                yield prefix + "mlp.up_proj.bias", up
                yield prefix + "mlp.down_proj.bias", layer.down_bias


def load_checkpoint(
    path: Path, *, context_tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[Parameters, Tensor, Tensor]:
    """Weights, and the rotary tables cos and sin of shape [context_tokens, head_dim] float32.

    Raises:
        ModelError: the folder cannot be read or served.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: cannot read {path}: {' '.join(str(error).split())[:300]}") from error
    architecture = Architecture.of_config(config, path)
    parameters = Parameters(architecture, device=device, dtype=dtype)
    try:
        parameters.copy_from(parameters.fitting(_stored_tensors(path)))
    except (OSError, EngineError) as error:
        raise ModelError(f"model.path: cannot load {path}: {error}") from error
    cos, sin = _rotary_tables(config, architecture, context_tokens, path)
    return parameters, cos.to(device), sin.to(device)


def _stored_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    index = path / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    for name in names:
        with safe_open(path / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                yield key, file.get_tensor(key)


def _rotary_tables(
    config: PretrainedConfig, architecture: Architecture, context_tokens: int, path: Path
) -> tuple[Tensor, Tensor]:
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in _STATIC_ROPE:
        raise ModelError(f"{path}: rotary scaling {kind!r} is not served by the embedded engine; {_WAY_OUT}")
    scale = 1.0
    if kind == "default":
        exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
        frequencies = 1.0 / rope["rope_theta"] ** exponents
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = torch.arange(context_tokens, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale
