"""Count the bytes that autograd keeps of a decoder layer of each family, and compare with the estimate.

The models have the default sizes of transformers, which are those of a published model, and fake tensors: real
functions and autograd, no data. A GPU's flash attention and the functions that autocast computes in float32 on a GPU
alone take the place of those of a CPU.
"""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from areal_rloo.config import load_config
from areal_rloo.learner.memory import activation_bytes
from areal_rloo.models.attention import PackedLayout, packed_attention
from areal_rloo.models.loading import switch_dropout_off
from areal_rloo.models.policy import last_hidden
from areal_rloo.models.sizes import Sizes
from areal_rloo.models.trainable import TRAINED_FAMILIES

NUM_TOKENS = 509  # no size of a model is a multiple
VARIANTS: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True},
    "gemma2": {"attn_logit_softcapping": None},
    "gpt_neox": {"use_parallel_residual": False, "hidden_act": "gelu_fast"},
    "olmo": {"clip_qkv": 8.0},
    "phi": {"qk_layernorm": True, "hidden_act": "gelu"},
}
MODELS = [
    *(pytest.param(family, {}, id=family) for family in TRAINED_FAMILIES),
    *(pytest.param(family, options, id=f"{family}_variant") for family, options in VARIANTS.items()),
]
ON_GPU = "gpu_in_tests"  # a name with "flash" would mean a package


class _Flash(torch.autograd.Function):
    """Keeps what flash attention keeps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors[:3])


def _attention_of_a_gpu(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    if v.dtype == torch.float32 or options.get("softcap") is not None:
        return packed_attention(module, q, k, v, mask, **options)
    q, k, v = (rows[0].transpose(0, 1) for rows in (q, k, v))
    return _Flash.apply(q.to(v.dtype).contiguous(), k.to(v.dtype).contiguous(), v.contiguous())[None], None


AttentionInterface.register(ON_GPU, _attention_of_a_gpu)


class _AutocastOfAGpu(TorchFunctionMode):
    """Computes in float32 the functions of the layers that autocast computes in float32 on a GPU, but not on a CPU."""

    WIDE = (torch.pow, Tensor.pow, Tensor.__pow__, torch.rsqrt, F.layer_norm)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.WIDE:
            args = tree_map(_widened, args)
        return function(*args, **(kwargs or {}))


def _widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _config(family: str, num_layers: int, options: dict[str, Any]) -> PreTrainedConfig:
    """Make the config of a family with few layers and a small vocabulary."""
    config: Any = AutoConfig.for_model(family)
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    for name, value in {"vocab_size": 64, "num_hidden_layers": num_layers, **special, **options}.items():
        setattr(config, name, value)
    if getattr(config, "head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * num_layers
    made: PreTrainedConfig = config
    return made


def _kept(config: PreTrainedConfig, *, low: bool, checkpointing: bool) -> float:
    """Count the bytes kept for the backward pass, per token, without weights and their copies in bfloat16.

    With checkpointing, these are the inputs of layers and the tensors above the layers.
    """
    kept: dict[int, Tensor] = {}
    layout = PackedLayout.of_lengths([NUM_TOKENS], torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ON_GPU)
        switch_dropout_off(model)
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        copied = {frozenset(weight.shape) for weight in model.parameters() if weight.dim() == 2}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            is_copy = tensor.dtype == torch.bfloat16 and tensor.dim() == 2 and frozenset(tensor.shape) in copied
            if storage._cdata not in weights and not is_copy:
                kept[storage._cdata] = tensor
            return tensor

        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=low)
        with _AutocastOfAGpu(), autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = last_hidden(model, torch.zeros(NUM_TOKENS, dtype=torch.int64), layout)
        assert hidden.requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / NUM_TOKENS


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "options"), MODELS)
def test_the_estimate_counts_the_tensors_that_autograd_keeps(family: str, options: dict[str, Any], dtype: str) -> None:
    """Compare a layer, and by the number of layers a whole model. With checkpointing, a layer at a time is kept."""
    low = dtype == "bfloat16"
    num_layers = AutoConfig.for_model(family).num_hidden_layers
    small = [_config(family, num, options) for num in (1, 2)]
    sizes = Sizes.of(small[0].to_dict())
    assert sizes is not None
    one, two = (_kept(config, low=low, checkpointing=False) for config in small)
    inputs = [_kept(config, low=low, checkpointing=True) for config in small]
    layer, layer_input = two - one, inputs[1] - inputs[0]
    assert 0.98 < sizes.kept_bytes(bfloat16=low) / layer < 1.02
    wholes = {
        False: one + (num_layers - 1) * layer,
        True: inputs[0] + (num_layers - 1) * layer_input + layer,
    }
    for checkpointing, whole in wholes.items():
        settings = [f"model.dtype={dtype}", f"learner.gradient_checkpointing={str(checkpointing).lower()}"]
        model = dataclasses.replace(sizes, num_layers=num_layers)
        estimated = activation_bytes(model, load_config("quickstart.yaml", settings), on_gpu=False)
        assert 0.98 < estimated / whole < 1.1, checkpointing
