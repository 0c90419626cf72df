"""A checkpoint in the engine's form: the weights with fused projections, and tables of rotary angles.

In: a Hugging Face folder of a family in `families.py`. Out: the tensors that `transformer.py` uses. New weights come by
Hugging Face name, of a model with adapters the adapters alone; all are checked before the first is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_rloo.config import LoraConfig
from areal_rloo.engines.embedded.families import Architecture, Rotary
from areal_rloo.errors import DecodeError, EngineError, ModelError
from areal_rloo.models.files import reading_model
from areal_rloo.models.folder import ADAPTER_DOWN, ADAPTER_UP, check_policy_weights
from areal_rloo.models.stored import read_parameters, stored_parameters

_Q, _K, _V = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
_QKV = "self_attn.qkv_proj"


@dataclass(slots=True)
class Adapter:
    """Low-rank adapters (LoRA) of the parts of a fused matrix: the product with x grows by x down^T up^T."""

    down: Tensor  # [rank * number of adapted parts, in]
    up: Tensor  # [out, rank * number of adapted parts]; 0 outside the block of each part


@dataclass(slots=True)
class Projection:
    """A linear layer; the weight is [out, in]."""

    weight: Tensor
    bias: Tensor | None
    adapter: Adapter | None


@dataclass(slots=True)
class Layer:
    """One decoder layer. Norms have weights of float32, with the offset of the family."""

    window: int | None
    rotation: int  # index of the rotary table
    attention_input_norm: Tensor | None
    qkv: Projection
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Projection
    attention_output_norm: Tensor | None
    mlp_input_norm: Tensor | None
    gate_up: Projection
    down: Projection
    mlp_output_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a parameter of the checkpoint within the tensors of the engine."""

    view: Tensor
    shape: torch.Size  # of the parameter, which is broadcast to the view
    order: Tensor | None  # row i of the view is row order[i] of the parameter, [num_rows] int64
    offset: float

    def fill(self, parameter: Tensor) -> None:
        if self.order is not None:
            parameter = parameter.to(self.order.device).index_select(0, self.order)
        self.view.copy_(parameter)
        if self.offset:
            self.view.add_(self.offset)


class Parameters:
    """All weights of a model, and a place for each Hugging Face parameter."""

    def __init__(
        self, architecture: Architecture, *, device: torch.device, dtype: torch.dtype, lora: LoraConfig | None = None
    ) -> None:
        """`lora`: keep adapters apart from the weights, 0 at first; new weights are then adapters alone."""
        a = self.architecture = architecture
        self._lora, self._device, self._dtype = lora, device, dtype
        self._places: dict[str, _Place] = {}
        self._orders = _row_orders(a, device)
        self.norm_eps = torch.tensor(a.norm_eps, device=device)
        self.embedding = self._fused("model.", {"embed_tokens": a.vocab_size}, a.hidden_size)
        self.final_norm = self._norm("model.norm")
        self.head = self.embedding if a.tied else self._fused("", {"lm_head": a.vocab_size}, a.hidden_size)
        self.layers = [self._layer(index) for index in range(a.num_layers)]

    def know(self, names: Iterable[str]) -> bool:
        """Return True if every name is of a weight, or of the head of a tied model."""
        return set(names) <= {*self._places, "lm_head.weight"}

    def fitting(self, weights: Iterable[tuple[str, Tensor]], *, of_files: bool = False) -> dict[str, Tensor]:
        """Return weights by Hugging Face name, new ones or those `of_files`.

        Raises:
            EngineError: a name or a shape differs.
        """
        given = dict(weights)
        if self.architecture.tied:
            given.pop("lm_head.weight", None)
        adapters = {name for name in self._places if name.endswith((ADAPTER_DOWN, ADAPTER_UP))}
        expected_names = self._places.keys() - adapters if of_files else adapters or self._places.keys()
        unknown, missing = given.keys() - expected_names, expected_names - given.keys()
        if unknown or missing:
            raise EngineError(
                f"weights do not fit the model: unknown {sorted(unknown)[:3]}, missing {sorted(missing)[:3]}"
            )
        for name, tensor in given.items():
            expected = self._places[name].shape
            if tensor.shape != expected:
                raise EngineError(f"weights: {name}: expected shape {tuple(expected)}, got {tuple(tensor.shape)}")
        return given

    def copy_from(self, fitting: dict[str, Tensor]) -> None:
        for name, tensor in fitting.items():
            self._places[name].fill(tensor)

    def clone(self) -> Parameters:
        copy = Parameters(self.architecture, device=self._device, dtype=self._dtype, lora=self._lora)
        for name, place in self._places.items():
            copy._places[name].view.copy_(place.view)
        return copy

    def _layer(self, index: int) -> Layer:
        a, prefix = self.architecture, f"model.layers.{index}."
        heads, kv, mlp = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.intermediate_size
        qkv = {_Q: heads, _K: kv, _V: kv}
        gate_up = {"mlp.gate_proj": mlp, "mlp.up_proj": mlp}
        if a.fused_qkv:
            qkv = {_QKV: heads + 2 * kv}
        if a.fused_gate_up:
            gate_up = {"mlp.gate_up_proj": 2 * mlp}
        norms = {
            f"{place}_norm": None if name is None else self._norm(prefix + name)
            for place, name in a.norms._asdict().items()
        }
        return Layer(
            **norms,
            window=a.windows[index],
            rotation=a.rotations[index],
            qkv=self._projection(prefix, qkv, a.hidden_size, bias=a.qkv_bias),
            qk_norm=None if a.qk_norm is None else self._qk_norm(prefix),
            output=self._projection(prefix, {"self_attn.o_proj": a.hidden_size}, heads, bias=a.output_bias),
            gate_up=self._projection(prefix, gate_up, a.hidden_size, bias=a.mlp_bias),
            down=self._projection(prefix, {"mlp.down_proj": a.hidden_size}, mlp, bias=a.mlp_bias),
        )

    def _projection(self, prefix: str, sizes: Mapping[str, int], inputs: int, *, bias: bool) -> Projection:
        weight = self._fused(prefix, sizes, inputs)
        return Projection(weight, self._fused(prefix, sizes) if bias else None, self._adapter(prefix, sizes, inputs))

    def _fused(self, prefix: str, sizes: Mapping[str, int], *inputs: int) -> Tensor:
        """Make a tensor of several parameters, [sum of sizes, *inputs]."""
        tensor = torch.empty(sum(sizes.values()), *inputs, device=self._device, dtype=self._dtype)
        for name, view in zip(sizes, tensor.split(list(sizes.values())), strict=True):
            place = _Place(view, view.shape, self._orders.get(name), 0.0)
            self._places[f"{prefix}{name}.{'weight' if inputs else 'bias'}"] = place
        return tensor

    def _adapter(self, prefix: str, sizes: Mapping[str, int], inputs: int) -> Adapter | None:
        lora = self._lora
        parts = [name for name in sizes if lora is not None and lora.adapts(name.rpartition(".")[2])]
        if lora is None or not parts:
            return None
        down = torch.zeros(lora.rank * len(parts), inputs, device=self._device, dtype=self._dtype)
        up = torch.zeros(sum(sizes.values()), lora.rank * len(parts), device=self._device, dtype=self._dtype)
        rows = dict(zip(sizes, up.split(list(sizes.values())), strict=True))
        for index, name in enumerate(parts):
            block = slice(index * lora.rank, (index + 1) * lora.rank)
            views = {ADAPTER_DOWN: (down[block], None), ADAPTER_UP: (rows[name][:, block], self._orders.get(name))}
            for kind, (view, order) in views.items():
                self._places[prefix + name + kind] = _Place(view, view.shape, order, 0.0)
        return Adapter(down, up)

    def _norm(self, name: str) -> Tensor:
        # Norms are float32, as in the learner under autocast.
        tensor = torch.empty(self.architecture.hidden_size, device=self._device)
        self._places[f"{name}.weight"] = _Place(tensor, tensor.shape, None, self.architecture.norm_offset)
        return tensor

    def _qk_norm(self, prefix: str) -> Tensor:
        a = self.architecture
        tensor = torch.empty(a.num_heads + a.num_kv_heads, a.head_dim, device=self._device)
        for name, view in zip(("q_norm", "k_norm"), tensor.split([a.num_heads, a.num_kv_heads]), strict=True):
            placed = view.flatten() if a.qk_norm == "projections" else view
            place = _Place(placed, placed.shape[-1:], None, a.norm_offset)
            self._places[f"{prefix}self_attn.{name}.weight"] = place
        return tensor


def _row_orders(a: Architecture, device: torch.device) -> dict[str, Tensor]:
    """Order the rows of queries and keys so that a rotation pairs number i of a head with number i + head_dim / 2.

    The products of queries and keys do not depend on the order. Empty if the rows of the checkpoint have this order.
    """
    numbers = torch.arange(a.head_dim)
    rotated, others = numbers[: a.rotary_dim], numbers[a.rotary_dim :].tensor_split(2)
    pairs = (rotated[::2], rotated[1::2]) if a.interleaved else rotated.tensor_split(2)
    order = torch.cat([pairs[0], others[0], pairs[1], others[1]])
    if torch.equal(order, numbers):
        return {}
    assert a.qk_norm is None, "the weights of norms of queries and keys would need the same order"
    rows = [(torch.arange(num)[:, None] * a.head_dim + order).flatten() for num in (a.num_heads, a.num_kv_heads)]
    starts = (0, len(rows[0]), len(rows[0]) + len(rows[1]))
    fused = torch.cat([start + part for start, part in zip(starts, (*rows, torch.arange(len(rows[1]))), strict=True)])
    orders = {_Q: rows[0], _K: rows[1], _QKV: fused}
    return {name: order.to(device) for name, order in orders.items()}


def load_checkpoint(
    path: Path, *, context_tokens: int, device: torch.device, dtype: torch.dtype, lora: LoraConfig | None = None
) -> tuple[Parameters, Tensor]:
    """Load the weights; compute the rotary tables of cos and signed sin.

    The tables are [num_tables, 2, context_tokens, head_dim] float32, in the order of `Architecture.rotary`. The first
    half of the signed sin is negated, so that a rotation needs no negation. Raises ModelError if the folder cannot be
    read, or the engine does not support the model.
    """
    stored = check_policy_weights("model.path", path)
    with reading_model(str(path)):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    architecture = Architecture.of_config(config, path)
    with reading_model(str(path)):
        tables = _rotary_tables(config, architecture, context_tokens)
    parameters = Parameters(architecture, device=device, dtype=dtype, lora=lora)
    try:
        if not parameters.know(stored):  # transformers ignores some tensors of old checkpoints
            stored = stored_parameters("model.path", path)
        parameters.copy_from(parameters.fitting(read_parameters(stored), of_files=True))
    except (OSError, DecodeError, EngineError, SafetensorError) as error:
        raise ModelError(f"model.path: cannot load {path}: {error}") from error
    return parameters, tables.to(device)


def _rotary_tables(config: PretrainedConfig, architecture: Architecture, context_tokens: int) -> Tensor:
    tables = []
    for rotary in architecture.rotary:
        frequencies, scale = _frequencies(config, rotary, architecture.rotary_dim)
        angles = torch.arange(context_tokens, dtype=torch.float32)[:, None] * frequencies
        cos, sin = scale * angles.cos(), scale * angles.sin()
        fixed = (0, architecture.head_dim // 2 - angles.shape[1])  # numbers that are not rotated
        cos, sin = F.pad(cos, fixed, value=1.0), F.pad(sin, fixed)
        tables.append(torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)]))
    return torch.stack(tables)


def _frequencies(config: PretrainedConfig, rotary: Rotary, rotary_dim: int) -> tuple[Tensor, float]:
    """Return angles per position, [rotary_dim / 2] float32, and the scale of cos and sin."""
    if rotary.parameters is None:
        return torch.zeros(rotary_dim // 2), 1.0
    kind = rotary.parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / rotary.parameters["rope_theta"] ** exponents, 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=rotary.layer_type)
    if len(frequencies) != rotary_dim // 2:
        raise ValueError(f"partial_rotary_factor is not that of a {config.model_type} model")
    return frequencies, scale
