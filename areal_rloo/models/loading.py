"""Load a model folder or hub name as a trainable policy with packed attention; keep a policy as a frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from areal_rloo.errors import ModelError
from areal_rloo.models.attention import packed_attention
from areal_rloo.models.files import model_folder, reading_model
from areal_rloo.models.folder import check_policy_weights
from areal_rloo.models.policy import Policy

PACKED_ATTENTION = "areal_rloo_packed"  # the name under which transformers knows `packed_attention`
AttentionInterface.register(PACKED_ATTENTION, packed_attention)

_OPTIONS: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": PACKED_ATTENTION}
_SAFE = {"use_safetensors": True, "trust_remote_code": False}  # no pickle, and no code of the folder


def load_policy(path: str, *, device: torch.device) -> PreTrainedModel:
    """Load a causal language model with float32 weights and packed attention, in eval mode (no dropout).

    Raises ModelError if the folder is missing, unreadable or quantized. `check_equality` tells whether the learner can
    train the model.
    """
    transformers_logging.disable_progress_bar()
    folder = model_folder(path)
    check_policy_weights("model.path", folder)
    missing: set[str] = set()

    def load() -> PreTrainedModel:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, **_OPTIONS, **_SAFE, output_loading_info=True
        )
        model: PreTrainedModel = loaded[0]
        missing.update(loaded[1]["missing_keys"])
        return model

    model = _checked(path, load)
    if missing:
        raise ModelError(
            f"model.path: {path} has no weights for {min(missing)}, which would be random; download the model again"
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"model.path: {path}: {name} was loaded as {parameter.dtype}, expected torch.float32; take "
                "a checkpoint with full-precision weights"
            )
    model.to(device)  # type: ignore[arg-type]
    return model


def empty_policy(path: str) -> PreTrainedModel:
    """Build the same model without memory for the weights, on torch's meta device; raises ModelError likewise."""

    folder = model_folder(path, weights=False)

    def build() -> PreTrainedModel:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **_OPTIONS)
        return model

    return _checked(path, build)


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the decoder layers of a model: the list with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def _checked(path: str, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Make a model, and switch dropout off in every mode."""
    with reading_model(path):
        model = make()
    switch_dropout_off(model)
    model.eval()
    return model


def switch_dropout_off(model: torch.nn.Module) -> None:
    """Set every probability of dropout to 0: with gradient checkpointing, transformers needs a model in train mode."""
    for module in model.modules():
        names = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        for name in ["p"] if isinstance(module, torch.nn.Dropout) else names:
            setattr(module, name, 0.0)


class Reference:
    """A frozen policy. The device computes; with `offload` the weights are in CPU memory between uses.

    The learner queries the reference before the forward passes of a train step, so both policies need not be on a GPU
    at the same time.
    """

    def __init__(self, policy: Policy, *, device: torch.device, offload: bool) -> None:
        self.policy = policy.requires_grad_(False)
        self._device = device
        self._home = torch.device("cpu") if offload else device
        policy.to(self._home)

    @contextmanager
    def loaded(self) -> Iterator[Policy]:
        """Move the policy to the device while the block runs."""
        self.policy.to(self._device)
        try:
            yield self.policy
        finally:
            self.policy.to(self._home)

    @torch.no_grad()
    def refresh(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these parameters, adapters among them, named and sharded like the reference's own."""
        own = dict(self.policy.causal.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)
