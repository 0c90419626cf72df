"""The built-in tiny model: a real transformers architecture, small enough to learn in minutes on a laptop.

The tokenizer has a token for each byte, so any text can be encoded and every digit is a separate token.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from areal_rloo.config import TinyModelConfig
from areal_rloo.files import use_umask

_SPECIAL = ("<pad>", "<eos>")
_ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes and two special tokens; decoding returns exactly the encoded text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def make_tiny_model(recipe: TinyModelConfig) -> PreTrainedModel:
    """Make a model with random weights from the seed of the recipe; float32, eval mode."""
    config_class, model_class = _ARCHITECTURES[recipe.architecture]
    config = config_class(
        vocab_size=len(_SPECIAL) + 256,
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=recipe.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},  # short texts: adjacent positions must differ
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model: PreTrainedModel = model_class(config)
    model.eval()
    return model


def save_tiny_model(model: PreTrainedModel, folder: Path) -> None:
    """Save model and tokenizer in Hugging Face format."""
    model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        use_umask(path)
    make_tiny_tokenizer().save_pretrained(folder)
