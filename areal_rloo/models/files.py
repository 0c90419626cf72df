"""Read tokenizer, stop tokens and folder of a model without building the model.

Rollout workers need only this part of transformers and start seconds earlier without the models of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from areal_rloo.config import ModelConfig
from areal_rloo.errors import DecodeError, ModelError
from areal_rloo.models.folder import INDEX, SINGLE, weight_files


def computation_dtype(model: ModelConfig) -> torch.dtype:
    """Convert `model.dtype` to a torch dtype of the same name."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    return dtype


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name.

    Raises ModelError if the folder is missing or unreadable, or the tokenizer has no end-of-sequence token.
    """
    with reading_model(path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"model.path: the tokenizer of {path} has no end-of-sequence token, so no completion can end")
    return tokenizer


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a completion, from the tokenizer and from the generation config of the model."""
    stops = {int(tokenizer.eos_token_id)}
    if (Path(path) / "generation_config.json").is_file() or not Path(path).is_dir():
        eos = None
        with reading_model(path), suppress(OSError):  # the hub model has no generation config
            eos = GenerationConfig.from_pretrained(path).eos_token_id
        if eos is not None:
            stops |= {eos} if isinstance(eos, int) else set(eos)
    return tuple(sorted(stops))


def model_folder(path: str) -> Path:
    """Return the local folder of a model; download the files from the hub if needed, or raise ModelError.

    Of the weights, only the files of the index, or model.safetensors: some models have a second copy in another form.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        folder = Path(snapshot_download(path, allow_patterns=["*.json", "*.txt", "*.model"]))
        weights = weight_files(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
        return Path(snapshot_download(path, allow_patterns=weights, revision=folder.name))
    except (OSError, ValueError, DecodeError) as error:
        raise ModelError(unreadable(path, error)) from error


@contextmanager
def reading_model(path: str) -> Iterator[None]:
    """Raise a ModelError if the libraries that read the files of a model raise any error in the block."""
    try:
        yield
    except Exception as error:
        raise ModelError(unreadable(path, error)) from error


def unreadable(path: str, error: Exception) -> str:
    """Explain why a model cannot be loaded, and the expected values."""
    reason = " ".join(str(error).split())[:300]
    return f"model.path: cannot load {path}: {reason}; expected a Hugging Face model folder, a hub name, or tiny"
