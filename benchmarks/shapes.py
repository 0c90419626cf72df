"""Random models in the shapes of published models, for benchmarks that need no trained weights and no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_rloo.models.sizes import SHIPPED, Sizes

SHAPES = {
    "0.5b": SHIPPED["Qwen/Qwen2.5-0.5B-Instruct"],
    "1.5b": SHIPPED["Qwen/Qwen2.5-1.5B-Instruct"],
    "0.5b untied": replace(SHIPPED["Qwen/Qwen2.5-0.5B-Instruct"], tied=False),
    "small": Sizes(1024, 64, 192, 2, 4, 2, 16, tied=True, gated=True),  # to try a benchmark out
}


def save_random(folder: Path, sizes: Sizes, *, max_tokens: int = 32_768) -> Path:
    """Save a random model of this shape unless the folder exists; in bfloat16, half the size on the disk."""
    if folder.exists():
        return folder
    config = Qwen2Config.from_dict(
        {
            "vocab_size": sizes.vocab_size,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "tie_word_embeddings": sizes.tied,
            "max_position_embeddings": max_tokens,
        }
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = Qwen2ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda" if torch.cuda.is_available() else "cpu")  # in a second
    model.tie_weights()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.ones_(parameter)
        else:  # logits spread as those of a trained model, or logprobs would not tell a wrong computation
            spread = 2 if "embed" in name or "head" in name else 1
            torch.nn.init.normal_(parameter, std=spread / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder
