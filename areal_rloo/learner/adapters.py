"""Add low-rank adapters (LoRA, with peft) to a policy, and read the weights with adapters merged in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_rloo.config import LoraConfig
from areal_rloo.errors import ModelError
from areal_rloo.learner.parallel.sharding import with_product

_ADAPTER = "default"  # the adapter name in peft


def add_adapters(causal: PreTrainedModel, lora: LoraConfig) -> None:
    """Add adapters to the target layers, initially without effect, and freeze all other weights.

    Raises ModelError if peft is not installed, or if the model lacks target layers.
    """
    try:
        import peft  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ModelError("learner.lora: needs peft; pip install 'areal_rloo[peft]'") from error
    targets = list(lora.targets)
    head = causal.get_output_embeddings()  # the head weight is used directly, not through an adapter
    known = {
        name.rsplit(".", 1)[-1]
        for name, module in causal.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    if not targets or not known.issuperset(targets):
        raise ModelError(
            f"learner.lora.targets: expected names of linear layers ({', '.join(sorted(known))}), "
            f"got {', '.join(sorted(set(targets) - known)) or 'none'}"
        )
    settings = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0)
    peft.inject_adapter_in_model(settings, causal, adapter_name=_ADAPTER)


def named_weights(causal: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by Hugging Face name, each storage once: tied embeddings appear under the first name.

    Adapters are merged in. Sharded weights stay sharded; every rank must then iterate over all of them.
    """
    parameters = {name: parameter.detach() for name, parameter in causal.named_parameters()}
    for name, parameter in parameters.items():
        layer, inside, kind = name.partition(".base_layer.")
        down = parameters.get(f"{layer}.lora_A.{_ADAPTER}.weight")
        if inside and kind == "weight" and down is not None:
            adapted: Any = causal.get_submodule(layer)
            up = parameters[f"{layer}.lora_B.{_ADAPTER}.weight"]
            yield f"{layer}.{kind}", with_product(parameter, up, down, float(adapted.scaling[_ADAPTER]))
        elif f".lora_A.{_ADAPTER}" not in name and f".lora_B.{_ADAPTER}" not in name:
            yield name.replace(".base_layer.", "."), parameter
