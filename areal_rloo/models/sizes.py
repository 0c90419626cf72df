"""The sizes of a decoder-only model, read from config.json; without torch, for the plans of a launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_rloo.config import TinyModelConfig

_CHUNK_LOGITS = 2**25  # in memory at the same time: 128 MiB of float32, twice that while differentiated
_CHUNK_LOGITS_OF_GPU = 2**27  # each chunk adds its gradient to that of the head: of a 1.5B model, 2.8 GB to move
_TINY_VOCABULARY = 258  # bytes and two special tokens
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}  # names of some families
_TIED = (  # unless config.json says otherwise
    *("gemma", "gemma2", "gemma3_text", "vaultgemma", "smollm3", "cohere", "cohere2", "starcoder2", "ernie4_5"),
)
_UNGATED = ("arcee", "gpt_neox", "nanochat", "phi", "starcoder2")  # their MLP is two matrices
DERIVED_HEADS = ("llama", "mistral", "qwen2")  # head_dim is hidden_size / heads if config.json has none

Numbers = tuple[int, int, int]
"""Numbers kept: float32 and bfloat16 with products in bfloat16, and float32 without."""

_STREAM: Mapping[str, Numbers] = {  # by norms, their places, and products with a bfloat16 copy of the input
    "arcee": (4, 4, 6),
    "cohere": (3, 5, 4),
    "cohere2": (3, 5, 4),
    "exaone4": (2, 7, 6),
    "gemma2": (8, 5, 10),
    "gemma3_text": (8, 5, 10),
    "glm": (4, 4, 6),
    "glm4": (6, 6, 10),
    "gpt_neox": (2, 2, 4),
    "nanochat": (2, 4, 4),
    "olmo": (2, 5, 4),
    "phi": (1, 4, 2),
    "phi3": (4, 2, 6),
    "starcoder2": (2, 4, 4),
}
_HEAD_NORMS: Mapping[str, Numbers] = {  # of queries and keys
    "exaone4": (1, 1, 2),
    "gemma3_text": (2, 0, 2),
    "hunyuan_v1_dense": (2, 0, 2),
    "nanochat": (1, 0, 1),
    "olmo2": (2, 0, 2),
    "olmo3": (2, 0, 2),
    "qwen3": (1, 1, 2),
}
_ACTIVATIONS: Mapping[str, Numbers] = {"gelu_new": (3, 2, 5), "gelu_fast": (0, 8, 8)}  # of several functions


@dataclass(frozen=True, slots=True)
class Kept:
    """How often autograd keeps each width of a decoder layer for a token; the default is that of Llama.

    tests/unit/learner/test_activations.py counts the tensors of every family. Attention is flash attention with
    products in bfloat16, or the stacked blocks of `models/attention.py` without.
    """

    hidden: Numbers = (4, 5, 6)
    heads: Numbers = (0, 2, 3)  # of queries and outputs
    kv_heads: Numbers = (0, 2, 2)
    inner: Numbers = (0, 4, 4)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Kept:
        """Read a config.json."""
        family = str(config.get("model_type"))
        stream, inner = _STREAM.get(family, cls().hidden), cls().inner
        if family == "gpt_neox" and config.get("use_parallel_residual", True):
            stream = (1, 2, 3)  # both norms have the same input
        if family in _UNGATED:
            inner = _ACTIVATIONS.get(str(config.get("hidden_act")), (0, 2, 2))
        heads, kv_heads = cls().heads, cls().kv_heads
        if config.get("attn_logit_softcapping"):  # no flash attention, so rotated heads stay float32
            heads = kv_heads = (1, 1, 2)
        for norm in (
            _HEAD_NORMS.get(family),
            (3, 0, 3) if config.get("use_qk_norm") and family == "cohere" else None,
            (1, 0, 1) if config.get("qk_layernorm") and family == "phi" else None,
        ):
            heads, kv_heads = (heads, kv_heads) if norm is None else (_sum(heads, norm), _sum(kv_heads, norm))
        if config.get("clip_qkv") is not None and family == "olmo":
            heads, kv_heads = _sum(heads, (0, 1, 1)), _sum(kv_heads, (0, 2, 2))
        return cls(stream, heads, kv_heads, inner)


def _sum(a: Numbers, b: Numbers) -> Numbers:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The dimensions of a decoder-only model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    gated: bool  # the MLP
    kept: Kept = Kept()
    logits_capped: bool = False
    counted: int | None = None  # parameters of the files

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes | None:
        """Read a config.json, or `to_dict()` of a transformers config; None if it lacks a size."""
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
            return None
        found = {
            "vocab_size": config.get("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": config.get("intermediate_size"),
            "num_layers": config.get("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or hidden // heads,
        }
        sizes = {name: value for name, value in found.items() if isinstance(value, int) and value > 0}
        tied = config.get("tie_word_embeddings", config.get("model_type") in _TIED)
        gated = config.get("model_type") not in _UNGATED
        if len(sizes) < len(found):
            return None
        capped = config.get("final_logit_softcapping") is not None
        return cls(**sizes, tied=bool(tied), gated=gated, kept=Kept.of(config), logits_capped=capped)

    @classmethod
    def of_tiny(cls, tiny: TinyModelConfig) -> Sizes:
        """Give the sizes of the built-in model."""
        hidden, heads = tiny.hidden_size, tiny.num_heads
        return cls(
            vocab_size=_TINY_VOCABULARY,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_layers=tiny.num_layers,
            num_heads=heads,
            num_kv_heads=tiny.num_kv_heads,
            head_dim=hidden // heads,
            tied=True,
            gated=True,
            kept=Kept.of({"model_type": tiny.architecture}),
        )

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a decoder layer, [out, in] by name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (heads, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, heads),
            **({"gate_proj": (inner, hidden)} if self.gated else {}),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }

    def kept_bytes(self, *, bfloat16: bool) -> int:
        """Count the bytes kept by autograd of a decoder layer, per token; `bfloat16` is the dtype of products."""
        kept, heads, kv = self.kept, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        numbers = (kept.hidden, kept.heads, kept.kv_heads, kept.inner)
        widths = (self.hidden_size, heads, kv, self.intermediate_size)
        return sum(
            width * (4 * wide + 2 * low if bfloat16 else 4 * alone)
            for width, (wide, low, alone) in zip(widths, numbers, strict=True)
        )

    @property
    def head(self) -> int:
        """Parameters of the head, or of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def largest_of_layer(self) -> int:
        """Parameters of the largest tensor of a decoder layer in the files; some families keep gate and up as one."""
        return self.intermediate_size * self.hidden_size * (2 if self.gated else 1)

    @property
    def outside(self) -> int:
        """Parameters outside the layers: of the embedding, and of a separate head."""
        return self.head * (1 if self.tied else 2)

    @property
    def of_layer(self) -> float:
        """Parameters of a decoder layer."""
        return (self.num_parameters - self.outside) / self.num_layers

    @property
    def num_parameters(self) -> int:
        """The parameters counted in files; else without norms and biases, which are under a thousandth."""
        if self.counted is not None:
            return self.counted
        layer = sum(rows * columns for rows, columns in self.matrices.values())
        return self.num_layers * layer + self.outside

    def num_adapted(self, rank: int, targets: tuple[str, ...] | None) -> int:
        """Parameters of adapters of a rank on these layers, which may be fused in the checkpoint; None: on all."""
        sides = 0
        for name in self.matrices if targets is None else targets:
            parts = [self.matrices[part] for part in _FUSED.get(name, (name,)) if part in self.matrices]
            sides += sum(rows for rows, _ in parts) + max((columns for _, columns in parts), default=0)
        return self.num_layers * rank * sides

    @property
    def cache_numbers(self) -> int:
        """Keys and values of a token, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


SHIPPED = {
    "Qwen/Qwen2.5-0.5B-Instruct": Sizes(151_936, 896, 4_864, 24, 14, 2, 64, tied=True, gated=True),
    "Qwen/Qwen2.5-1.5B-Instruct": Sizes(151_936, 1_536, 8_960, 28, 12, 2, 128, tied=True, gated=True),
    "Qwen/Qwen2.5-7B-Instruct": Sizes(152_064, 3_584, 18_944, 28, 28, 4, 128, tied=False, gated=True),
    "Qwen/Qwen3-8B": Sizes(
        151_936, 4_096, 12_288, 36, 32, 8, 128, tied=False, gated=True, kept=Kept.of({"model_type": "qwen3"})
    ),
}
"""The models of the shipped configs, for a plan before the first download."""


def chunk_logits(*, on_gpu: bool) -> int:
    """Return the number of logits in memory at the same time."""
    return _CHUNK_LOGITS_OF_GPU if on_gpu else _CHUNK_LOGITS
