"""A checkpoint in the engine's form: the architecture, and the weights with fused projections.

In: a Hugging Face folder (Qwen2, Qwen3, Llama). Out: the tensors that `transformer.py` uses. New weights come by
Hugging Face name; all are checked before the first is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_rloo.config import LoraConfig
from areal_rloo.errors import DecodeError, EngineError, ModelError
from areal_rloo.models.files import reading_model
from areal_rloo.models.folder import ADAPTER_DOWN, ADAPTER_UP, check_policy, check_weights, weight_files
from areal_rloo.models.sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(Sizes):
    """The sizes and switches of a checkpoint."""

    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def of_config(cls, config: PretrainedConfig, path: Path) -> Architecture:
        """Read a transformers config; raises ModelError if the engine does not support the model."""
        check_policy("model.path", str(path), config.to_dict(), context_tokens=2**31)
        windows = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
        if config.model_type not in ("qwen2", "qwen3", "llama") or windows:
            raise ModelError(
                f"{path}: a {config.model_type} model or a window is not served; use rollout.engine=sglang"
            )
        if config.hidden_act != "silu":
            raise ModelError(
                f"{path}: activation {config.hidden_act!r} is not served, expected 'silu'; use rollout.engine=sglang"
            )
        sizes = Sizes.of(config.to_dict())
        if sizes is None:
            raise ModelError(f"{path}: config.json lacks a size, such as hidden_size; download the model again")
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            **asdict(sizes),
            norm_eps=config.rms_norm_eps,
            qkv_bias=config.model_type == "qwen2" or attention_bias,
            output_bias=config.model_type != "qwen2" and attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=config.model_type == "qwen3",
        )


@dataclass(slots=True)
class Adapter:
    """Low-rank adapters (LoRA) of the parts of a fused matrix: the product with x grows by x down^T up^T."""

    down: Tensor  # [rank * number of adapted parts, in]
    up: Tensor  # [out, rank * number of adapted parts]; 0 outside the block of each part


@dataclass(slots=True)
class Layer:
    """One decoder layer; weight matrices are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qkv_adapter: Adapter | None
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Tensor
    output_bias: Tensor | None
    output_adapter: Adapter | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    gate_up_adapter: Adapter | None
    down: Tensor
    down_bias: Tensor | None
    down_adapter: Adapter | None


class Parameters:
    """All weights of a model, and a view for each Hugging Face parameter."""

    def __init__(
        self, architecture: Architecture, *, device: torch.device, dtype: torch.dtype, lora: LoraConfig | None = None
    ) -> None:
        """`lora`: keep adapters apart from the weights, 0 at first; None if weights have none, or come merged."""
        a = self.architecture = architecture
        self._lora = lora
        heads, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        hidden, mlp = a.hidden_size, a.intermediate_size
        qkv = {"self_attn.q_proj": heads, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        gate_up, down = {"mlp.gate_proj": mlp, "mlp.up_proj": mlp}, {"mlp.down_proj": hidden}
        output = {"self_attn.o_proj": hidden}
        self._places: dict[str, Tensor] = {}

        def fused(prefix: str, sizes: dict[str, int], *inputs: int, norm: bool = False) -> Tensor:
            """Make a tensor of several parameters, [sum of sizes, *inputs]."""
            # Norms are float32, as in the learner under autocast.
            tensor = torch.empty(sum(sizes.values()), *inputs, device=device, dtype=torch.float32 if norm else dtype)
            kind = "weight" if inputs or norm else "bias"
            names = (f"{prefix}{name}.{kind}" for name in sizes)
            self._places |= zip(names, tensor.split(list(sizes.values())), strict=True)
            return tensor

        def adapter(prefix: str, sizes: dict[str, int], inputs: int) -> Adapter | None:
            parts = [name for name in sizes if lora is not None and name.rpartition(".")[2] in lora.targets]
            if lora is None or not parts:
                return None
            down = torch.zeros(lora.rank * len(parts), inputs, device=device, dtype=dtype)
            up = torch.zeros(sum(sizes.values()), lora.rank * len(parts), device=device, dtype=dtype)
            rows = dict(zip(sizes, up.split(list(sizes.values())), strict=True))
            for index, name in enumerate(parts):
                block = slice(index * lora.rank, (index + 1) * lora.rank)
                self._places[f"{prefix}{name}{ADAPTER_DOWN}"] = down[block]
                self._places[f"{prefix}{name}{ADAPTER_UP}"] = rows[name][:, block]
            return Adapter(down, up)

        def layer(prefix: str) -> Layer:
            heads_of = {"self_attn.q_norm": a.num_heads, "self_attn.k_norm": a.num_kv_heads}
            return Layer(
                input_norm=fused(prefix, {"input_layernorm": hidden}, norm=True),
                qkv=fused(prefix, qkv, hidden),
                qkv_bias=fused(prefix, qkv) if a.qkv_bias else None,
                qk_norm=fused(prefix, heads_of, a.head_dim, norm=True) if a.qk_norm else None,
                qkv_adapter=adapter(prefix, qkv, hidden),
                output=fused(prefix, output, heads),
                output_bias=fused(prefix, output) if a.output_bias else None,
                output_adapter=adapter(prefix, output, heads),
                mlp_norm=fused(prefix, {"post_attention_layernorm": hidden}, norm=True),
                gate_up=fused(prefix, gate_up, hidden),
                gate_up_bias=fused(prefix, gate_up) if a.mlp_bias else None,
                gate_up_adapter=adapter(prefix, gate_up, hidden),
                down=fused(prefix, down, mlp),
                down_bias=fused(prefix, down) if a.mlp_bias else None,
                down_adapter=adapter(prefix, down, mlp),
            )

        self.norm_eps = torch.tensor(a.norm_eps, device=device)
        self.embedding = fused("model.", {"embed_tokens": a.vocab_size}, hidden)
        self.final_norm = fused("model.", {"norm": hidden}, norm=True)
        self.head = self.embedding if a.tied else fused("", {"lm_head": a.vocab_size}, hidden)
        self.layers = [layer(f"model.layers.{index}.") for index in range(a.num_layers)]

    def fitting(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return new weights by Hugging Face name; raises EngineError if a name or a shape differs."""
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

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters by name."""
        return ((name, place) for name, place in self._places.items() if name.endswith((ADAPTER_DOWN, ADAPTER_UP)))

    def copy_from(self, fitting: dict[str, Tensor]) -> None:
        for name, tensor in fitting.items():
            self._places[name].copy_(tensor)

    def clone(self) -> Parameters:
        device, dtype = self.embedding.device, self.embedding.dtype
        copy = Parameters(self.architecture, device=device, dtype=dtype, lora=self._lora)
        copy.copy_from(self._places)
        return copy


def load_checkpoint(
    path: Path, *, context_tokens: int, device: torch.device, dtype: torch.dtype, lora: LoraConfig | None = None
) -> tuple[Parameters, Tensor]:
    """Load the weights; compute the rotary tables cos and signed sin, [2, context_tokens, head_dim] float32.

    The first half of the signed sin is negated, so that a rotation needs no negation. Raises ModelError if the folder
    cannot be read, or the engine does not support the model.
    """
    check_weights("model.path", path)
    with reading_model(str(path)):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    architecture = Architecture.of_config(config, path)
    parameters = Parameters(architecture, device=device, dtype=dtype, lora=lora)
    try:
        parameters.copy_from(parameters.fitting(chain(_stored_tensors(path), parameters.adapters())))
    except (OSError, DecodeError, EngineError, SafetensorError) as error:
        raise ModelError(f"model.path: cannot load {path}: {error}") from error
    return parameters, _rotary_tables(config, architecture, context_tokens).to(device)


def _stored_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    index = path / "model.safetensors.index.json"
    names = weight_files(index) if index.is_file() else ["model.safetensors"]
    for name in names:
        with safe_open(path / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                yield key, file.get_tensor(key)


def _rotary_tables(config: PretrainedConfig, architecture: Architecture, context_tokens: int) -> Tensor:
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    scale = 1.0
    if kind == "default":
        exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
        frequencies = 1.0 / rope["rope_theta"] ** exponents
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = torch.arange(context_tokens, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return scale * torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])
