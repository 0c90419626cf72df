"""Add low-rank adapters (LoRA, with peft) to a policy; read them alone, or weights with them apart or merged in.

Adapters *apart* are two more tensors of a layer, LAYER.lora_A.weight [rank, in] and LAYER.lora_B.weight [out, rank],
already scaled: the layer's output grows by x A^T B^T. *Merged in*, the layer's weight is W + B A. In bfloat16 this sum
is rounded to steps of 2^-8 of a weight, and a change smaller than half a step is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from areal_rloo.config import LoraConfig
from areal_rloo.errors import ModelError, install
from areal_rloo.files import use_umask
from areal_rloo.learner.parallel.sharding import local, with_product
from areal_rloo.models.folder import ADAPTER_DOWN, ADAPTER_UP, check_targets

_ADAPTER = "default"  # the adapter name in peft
Form = Literal["merged", "apart", "adapters"]  # of weights with adapters; the last without the frozen weights
_ROWS = 256  # of a weight, compared at once: of whole matrices the copies would have 34 bytes a number


class Rounding(NamedTuple):
    """What rounding leaves of the change that adapters make to the weights of a rank."""

    kept: float  # product of the rounded change with the change, summed over all adapted weights
    change: float  # square of the change, summed


def add_adapters(causal: PreTrainedModel, lora: LoraConfig) -> None:
    """Add adapters to the target layers, initially without effect, and freeze all other weights.

    Raises ModelError if peft is not installed, or if the model lacks target layers.
    """
    try:
        import peft  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ModelError(f"learner.lora: needs peft; {install('peft')}") from error
    head = causal.get_output_embeddings()  # the head weight is used directly, not through an adapter
    known = {
        name.rsplit(".", 1)[-1]
        for name, module in causal.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    check_targets(lora, known)
    targets = sorted(filter(lora.adapts, known))
    settings = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0)
    peft.inject_adapter_in_model(settings, causal, adapter_name=_ADAPTER)


def named_weights(causal: PreTrainedModel, form: Form = "merged") -> Iterator[tuple[str, Tensor]]:
    """Yield weights by Hugging Face name, each storage once: tied embeddings appear under the first name.

    Adapters are merged in, follow apart, or come alone. Sharded weights stay sharded; every rank must then iterate over
    all.
    """
    adapters = {name: (up, down, scaling) for name, up, down, scaling in _adapters(causal)}
    for name, parameter in _frozen(causal) if form != "adapters" else ():
        if name in adapters and form == "merged":
            yield name, with_product(parameter, *adapters[name])
        else:
            yield name, parameter
    for name, (up, down, scaling) in adapters.items() if form != "merged" else ():
        yield name.removesuffix(".weight") + ADAPTER_DOWN, down
        yield name.removesuffix(".weight") + ADAPTER_UP, scaling * up


def rounding(causal: PreTrainedModel, dtype: torch.dtype) -> Rounding:
    """Measure how much rounding merged weights to the dtype leaves of the adapters' change; every rank calls this."""
    weights, kept, change = dict(_frozen(causal)), 0.0, 0.0
    for name, up, down, scaling in _adapters(causal):
        merged, weight = local(with_product(weights[name], up, down, scaling)), local(weights[name])
        sums = torch.zeros(2, dtype=torch.float64, device=weight.device)
        for after, before in zip(merged.split(_ROWS), weight.split(_ROWS), strict=True):
            exact, rounded = (after - before).double(), after.to(dtype).double() - before.to(dtype).double()
            sums += torch.stack([(rounded * exact).sum(), exact.square().sum()])
        kept, change = kept + float(sums[0]), change + float(sums[1])
    return Rounding(kept, change)


def lost_share(roundings: Iterable[Rounding]) -> float:
    """Return the share of the adapters' change, along its direction, that rounding removes; NaN without a change."""
    kept, change = (math.fsum(values) for values in zip((0.0, 0.0), *roundings, strict=True))
    return 1 - kept / change if change > 0 else math.nan


def merge(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the adapters of whole weights (by name, adapters apart) in place, and return them removed."""
    adapters = {name: weights.pop(name) for name in list(weights) if name.endswith((ADAPTER_DOWN, ADAPTER_UP))}
    for name in filter(lambda name: name.endswith(ADAPTER_DOWN), adapters):
        layer = name.removesuffix(ADAPTER_DOWN)
        weight, up, down = weights[f"{layer}.weight"], adapters[layer + ADAPTER_UP], adapters[name]
        weight.copy_(torch.addmm(weight.float(), up.float(), down.float()))
    return adapters


def write_adapters(folder: Path, adapters: dict[str, Tensor], lora: LoraConfig, *, base: str) -> None:
    """Write a folder for `PeftModel.from_pretrained` of peft, on top of the model `base`."""
    import peft  # noqa: PLC0415 - an extra

    settings: Any = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted({name.rsplit(".", 3)[-3] for name in adapters}),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    settings.save_pretrained(str(folder))
    path = folder / "adapter_model.safetensors"
    scaling = lora.alpha / lora.rank  # peft scales B itself
    plain = {name: tensor / scaling if name.endswith(ADAPTER_UP) else tensor for name, tensor in adapters.items()}
    save_file({f"base_model.model.{name}": tensor for name, tensor in plain.items()}, path)
    use_umask(path)


def _frozen(causal: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights but the adapters', by Hugging Face name."""
    for name, parameter in causal.named_parameters():
        if f".lora_A.{_ADAPTER}" not in name and f".lora_B.{_ADAPTER}" not in name:
            yield name.replace(".base_layer.", "."), parameter.detach()


def _adapters(causal: PreTrainedModel) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Yield of each adapter: the name of the adapted weight, B [out, rank], A [rank, in], and the scale of B A."""
    for layer, module in causal.named_modules():
        if hasattr(module, "lora_A") and _ADAPTER in module.lora_A:
            adapted: Any = module
            up, down = adapted.lora_B[_ADAPTER].weight, adapted.lora_A[_ADAPTER].weight
            yield f"{layer}.weight", up.detach(), down.detach(), float(adapted.scaling[_ADAPTER])
