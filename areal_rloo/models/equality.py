"""Check that a packed row has the logprobs of transformers' own forward, for a small copy of a model's architecture.

The copy keeps every option that changes a forward (types of layers, caps, scales, biases, rotary positions), has random
weights and windows of a few tokens, and takes a tenth of a second. Rank 0 makes the check before weights are loaded.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from areal_rloo.errors import ModelError
from areal_rloo.models.attention import PackedLayout
from areal_rloo.models.files import model_folder, reading_model
from areal_rloo.models.folder import check_trainable
from areal_rloo.models.loading import PACKED_ATTENTION, switch_dropout_off
from areal_rloo.models.policy import Policy
from areal_rloo.models.sizes import Sizes

_LENGTHS = [21, 5, 13]  # longer and shorter than the window
_WINDOW = 8
_VOCABULARY = 97
_NUM_LAYERS = 4
_MOST_NATS = 1e-4
_LEAST_NATS = 1e-2  # by which logprobs change if a sequence sees its neighbours


def check_equality(path: str, *, context_tokens: int) -> None:
    """Raise ModelError if the learner's logprobs of a model of this folder would differ from those of transformers.

    Also refuses a model with state beside its parameters, which no broadcast and no checkpoint would carry.
    `context_tokens`: of the longest sequence of the run.
    """
    folder = model_folder(path)
    check_trainable("model.path", folder, context_tokens=context_tokens)
    with reading_model(path):
        model = small_model(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        difference, seen = compare(model)
    if beside := model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        raise ModelError(
            f"model.path: {path}: {min(beside)} is no parameter, but part of the weights; expected parameters alone, "
            "which the learner trains, broadcasts and saves; take another model"
        )
    assert seen > _LEAST_NATS, f"the check of {path} cannot see a wrong row: {seen} nats"
    if not difference < _MOST_NATS:
        raise ModelError(
            f"model.path: {path}: logprobs of a packed row differ by {difference:.2g} nats from those of transformers "
            f"{transformers.__version__}, expected less than {_MOST_NATS}; the learner cannot train this "
            "model; take another model"
        )


def small_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Make a small random float32 model of this architecture, in eval mode; the same for every call."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(_small(config), dtype=torch.float32)
        _randomize(model.eval())
    return model


def compare(model: PreTrainedModel) -> tuple[float, float]:
    """Return two largest differences in nats of a model of `small_model`, which then has packed attention.

    The first is between a packed row and transformers' forward of each sequence alone. The second is between this
    forward and that of all sequences as a single sequence, which a wrong layout would give.
    """
    model.set_attn_implementation("eager")
    switch_dropout_off(model)
    with torch.no_grad():
        ids = (torch.arange(sum(_LENGTHS)) * 37 + 5) % _VOCABULARY
        alone = torch.cat([_own_logprobs(model, part)[1:] for part in ids.split(_LENGTHS)])
        together = torch.cat([part[1:] for part in _own_logprobs(model, ids).split(_LENGTHS)])
        model.train().set_attn_implementation(PACKED_ATTENTION)  # as with gradient checkpointing
        packed = _packed_logprobs(model, ids)
    return float((packed - alone).abs().max()), float((together - alone).abs().max())


def _small(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy a config with few layers of each type, few heads, short windows and a small vocabulary."""
    small: Any = copy.deepcopy(config)
    sizes = Sizes.of(config.to_dict())
    assert sizes is not None, "the learner trains families whose config.json has all sizes"
    heads, kv_heads, size = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    small.vocab_size = _VOCABULARY
    small.num_hidden_layers = _NUM_LAYERS
    small.num_attention_heads = 4
    small.num_key_value_heads = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    small.hidden_size = 4 * size
    small.intermediate_size = 8 * size
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        small.layer_types = _some_of_each(kinds)
    rotated = getattr(config, "no_rope_layers", None)  # of smollm3; by layer: 0 or 1
    if rotated is not None:
        small.no_rope_layers = _some_of_each(rotated)
    if getattr(config, "sliding_window", None) is not None:
        small.sliding_window = _WINDOW
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    made: PreTrainedConfig = small
    return made


def _some_of_each(kinds: list[Any]) -> list[Any]:
    """Return the first kinds of layers, for as many layers as the copy has, or some of each kind if these lack any."""
    covered = len(kinds) >= _NUM_LAYERS and set(kinds[:_NUM_LAYERS]) == set(kinds)
    return (list(kinds) if covered else sorted(set(kinds)) * _NUM_LAYERS)[:_NUM_LAYERS]


def _randomize(model: PreTrainedModel) -> None:
    """Draw weights that keep the size of activations, so positions, windows and caps change the logprobs."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.rand_like(parameter) - 0.5)


def _own_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Compute the logprob of each token, [num_tokens] float32, with the model's own attention and logits.

    The first token has none, and gets 0.
    """
    log_p = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), log_p.gather(1, ids[1:, None])[:, 0]])


def _packed_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Compute the same for all sequences in a row, as a train step does: [num_tokens - num_sequences] float32."""
    ends = torch.tensor(_LENGTHS).cumsum(0) - 1
    predicts = torch.tensor([place for place in range(len(ids)) if place not in ends])
    layout = PackedLayout.of_lengths(_LENGTHS, ids.device)
    policy = Policy(model, temperature=1.0, dtype=torch.float32)
    logprobs: Tensor = policy(ids, layout, predicts, ids[predicts + 1])[0]
    return logprobs
