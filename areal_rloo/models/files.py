"""What is read of a model without building it: its folder, its tokenizer, the tokens that end a completion.

Rollout workers need no more of transformers, and are there seconds earlier without its models.
"""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from areal_rloo.config import ModelConfig
from areal_rloo.errors import ModelError


def computation_dtype(model: ModelConfig) -> torch.dtype:
    """`model.dtype`, which is called as torch calls it."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    return dtype


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name.

    Raises:
        ModelError: the folder is missing or unreadable, or the tokenizer has no end-of-sequence token.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(unreadable(path, error)) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"model.path: the tokenizer of {path} has no end-of-sequence token, so no completion can end")
    return tokenizer


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's and those of the model's generation config."""
    stops = {int(tokenizer.eos_token_id)}
    if (Path(path) / "generation_config.json").is_file() or not Path(path).is_dir():
        try:
            eos = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            eos = None  # a hub model without one
        if eos is not None:
            stops |= {eos} if isinstance(eos, int) else set(eos)
    return tuple(sorted(stops))


def model_folder(path: str) -> Path:
    """The local folder of a model: the path itself, or where the hub's files are, downloaded if need be.

    Raises:
        ModelError: it is neither a folder nor to be had from the hub.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except (OSError, ValueError) as error:
        raise ModelError(unreadable(path, error)) from error


def unreadable(path: str, error: Exception) -> str:
    """Why a model cannot be loaded, and what is expected."""
    reason = " ".join(str(error).split())[:300]
    return f"model.path: cannot load {path}: {reason}; expected a Hugging Face model folder, a hub name, or tiny"
