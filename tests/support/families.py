"""Tiny models of many families with random weights: 4 layers of every type, grouped heads, windows of 8 tokens."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 300
WINDOW = 8  # tokens
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,  # so that positions, windows and caps change the logprobs
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
_PARTIAL = {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}
_BY_TYPE = {"rope_parameters": {"sliding_attention": _ROPE | {"rope_theta": 100.0}, "full_attention": _ROPE}}
_ALPHA = {"rope_parameters": _ROPE | {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}}
_SLIDING = {"sliding_window": WINDOW, "layer_types": _ALTERNATING}
_QWEN_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}
_MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}

_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
_SCALED_QUERIES = _ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2_sliding": {"model_type": "qwen2", **_QWEN_SLIDING},
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    "qwen3_sliding": {"model_type": "qwen3", "head_dim": 24, **_QWEN_SLIDING},
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "ministral": {"model_type": "ministral", "head_dim": 16, **_SLIDING},
    "gemma": {"model_type": "gemma", "head_dim": 24},
    "gemma2": {"model_type": "gemma2", "head_dim": 24, "query_pre_attn_scalar": 10, **_CAPS, **_SLIDING},
    "gemma3_text": {"model_type": "gemma3_text", "head_dim": 24, "query_pre_attn_scalar": 10, **_BY_TYPE, **_SLIDING},
    "phi3": {"model_type": "phi3", "sliding_window": WINDOW, **_PARTIAL},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", **_BY_TYPE, **_SLIDING},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 0]},
    "granite": {"model_type": "granite", "attention_multiplier": 0.1, **_MULTIPLIERS},
    "glm": {"model_type": "glm", "head_dim": 16, **_PARTIAL},
    "glm4": {"model_type": "glm4", "head_dim": 16, **_PARTIAL},
    "cohere2": {"model_type": "cohere2", "logit_scale": 0.5, **_SLIDING},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": WINDOW},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True},
    "apertus": {"model_type": "apertus"},
    "diffllama": {"model_type": "diffllama"},
    "jais2": {"model_type": "jais2"},
    "lfm2": {"model_type": "lfm2"},
    "minicpm3": {"model_type": "minicpm3", "scale_emb": 1, "num_key_value_heads": 4, **_LATENT},
    "ministral3": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": _SCALED_QUERIES},
    "persimmon": {"model_type": "persimmon", **_PARTIAL},
    "arcee": {"model_type": "arcee"},
    "cohere": {"model_type": "cohere", "logit_scale": 0.5},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16, "use_bias": True},
    "exaone4": {"model_type": "exaone4", **_SLIDING},
    "gpt_neox_japanese": {"model_type": "gpt_neox_japanese", "num_key_value_heads": 4},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": 4, **_PARTIAL},
    "helium": {"model_type": "helium", "head_dim": 16},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", "head_dim": 16},
    "hunyuan_v1_dense_alpha": {"model_type": "hunyuan_v1_dense", "head_dim": 16, **_ALPHA},
    "internlm3": {"model_type": "internlm3", "bias": True, "qkv_bias": True},
    "nanochat": {"model_type": "nanochat", "final_logit_softcapping": 3.0},
    "olmo": {"model_type": "olmo", "clip_qkv": 0.5},
    "phi": {"model_type": "phi", **_PARTIAL},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
    "vaultgemma": {"model_type": "vaultgemma", "head_dim": 24, "query_pre_attn_scalar": 10, **_CAPS, **_SLIDING},
}
"""The options of a transformers config by name; `tie_word_embeddings` has the default of the family."""


def family_config(name: str, **options: Any) -> PreTrainedConfig:
    """Make the config of a family; the options replace those of the family, such as `tie_word_embeddings`."""
    return AutoConfig.for_model(**deepcopy({"rope_parameters": _ROPE, **SIZES, **FAMILIES[name], **options}))


def family_model(name: str, *, seed: int = 3, **options: Any) -> PreTrainedModel:
    """Make a float32 model in eval mode; all weights are random, those of norms and biases too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(family_config(name, **options)).eval()
        with torch.no_grad():
            for weight_name, weight in model.named_parameters():
                if weight_name.endswith("bias"):
                    weight.normal_(std=0.5)
                elif "norm" in weight_name:
                    weight.add_(torch.rand_like(weight) - 0.5)  # 1, or 0 where the family adds 1
    return model


def save_family(name: str, folder: Path, *, seed: int = 3, **options: Any) -> PreTrainedModel:
    """Save such a model in Hugging Face format, without a tokenizer, and return the model."""
    model = family_model(name, seed=seed, **options)
    model.save_pretrained(folder)
    return model
