"""From a model folder or hub name to a policy that can be trained, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from areal_rloo.config import ModelConfig
from areal_rloo.errors import ModelError
from areal_rloo.models.attention import PACKED_ATTENTION

_ARCHITECTURES = ("qwen2", "qwen3", "llama")  # held against their own logits in tests/unit


def load_policy(path: str, *, device: torch.device) -> PreTrainedModel:
    """A causal language model with float32 weights and packed attention, in eval mode (no dropout).

    Raises:
        ModelError: the folder is missing, unreadable, or of an architecture whose logprobs we do not compute; says
            which and what to do.
    """
    transformers_logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_unreadable(path, error)) from error
    _check(path, model)
    model.to(device)  # type: ignore[arg-type]
    return model


def empty_policy(path: str) -> PreTrainedModel:
    """The same model without memory for its weights: on torch's meta device.

    Raises:
        ModelError: as `load_policy`.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_unreadable(path, error)) from error
    _check(path, model)
    return model


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """What an empty model lacks beside its weights, once those have memory: the frequencies of its rotations."""
    inner: Any = model.base_model
    inner.rotary_emb = type(inner.rotary_emb)(model.config).to(device)


def computation_dtype(model: ModelConfig) -> torch.dtype:
    """`model.dtype`, which is called as torch calls it."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    return dtype


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name.

    Raises:
        ModelError: as `load_policy`, or the tokenizer has no end-of-sequence token.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_unreadable(path, error)) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"model.path: the tokenizer of {path} has no end-of-sequence token, so no completion can end")
    return tokenizer


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's and those of the model's generation config."""
    from transformers import GenerationConfig  # noqa: PLC0415 - slow to import, and the launcher's children start often

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
        raise ModelError(_unreadable(path, error)) from error


def _check(path: str, model: PreTrainedModel) -> None:
    """Whether its logprobs are what we compute; and no dropout, whatever mode it is put in."""
    if model.config.model_type not in _ARCHITECTURES:
        raise ModelError(
            f"model.path: {path} is a {model.config.model_type} model; expected one of {', '.join(_ARCHITECTURES)}, "
            "whose logprobs are those of its hidden states and head alone, without soft caps, scales or windows"
        )
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - a name that torch's own types do not know
    model.eval()


def _unreadable(path: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    return f"model.path: cannot load {path}: {reason}; expected a Hugging Face model folder, a hub name, or tiny"
