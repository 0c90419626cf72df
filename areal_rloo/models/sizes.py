"""The sizes of a decoder-only model, read from config.json; without torch, for the plans of a launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_rloo.config import TinyModelConfig

CHUNK_LOGITS = 2**25  # logits in memory at the same time: 128 MiB of float32, twice that while differentiated
_TINY_VOCABULARY = 258  # bytes and two special tokens
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}  # names of some families
_TIED = (  # unless config.json says otherwise
    *("gemma", "gemma2", "gemma3_text", "vaultgemma", "smollm3", "cohere", "cohere2", "starcoder2", "ernie4_5"),
)
_UNGATED = ("arcee", "gpt_neox", "nanochat", "phi", "starcoder2")  # their MLP is two matrices


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
        return cls(**sizes, tied=bool(tied), gated=gated) if len(sizes) == len(found) else None

    @classmethod
    def of_tiny(cls, tiny: TinyModelConfig) -> Sizes:
        """Give the sizes of the built-in model."""
        hidden, heads = tiny.hidden_size, tiny.num_heads
        inner, head_dim = 3 * hidden, hidden // heads
        return cls(
            _TINY_VOCABULARY, hidden, inner, tiny.num_layers, heads, tiny.num_kv_heads, head_dim, tied=True, gated=True
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

    @property
    def head(self) -> int:
        """Parameters of the head, or of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters without norms and biases, which are under a thousandth."""
        layer = sum(rows * columns for rows, columns in self.matrices.values())
        return self.num_layers * layer + self.head * (1 if self.tied else 2)

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
    "Qwen/Qwen3-8B": Sizes(151_936, 4_096, 12_288, 36, 32, 8, 128, tied=False, gated=True),
}
"""The models of the shipped configs, for a plan before the first download."""
