"""From a model folder or hub name to a policy that can be trained."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from areal_rloo.errors import ModelError
from areal_rloo.models.attention import PACKED_ATTENTION
from areal_rloo.models.files import unreadable

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
        raise ModelError(unreadable(path, error)) from error
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
        raise ModelError(unreadable(path, error)) from error
    _check(path, model)
    return model


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """What an empty model lacks beside its weights, once those have memory: the frequencies of its rotations."""
    inner: Any = model.base_model
    inner.rotary_emb = type(inner.rotary_emb)(model.config).to(device)


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
