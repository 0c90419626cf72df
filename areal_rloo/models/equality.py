"""Check that a packed row has the logprobs of transformers' own forward, for a small copy of a model's architecture.

The copy keeps every option that changes a forward (types of layers, caps, scales, biases, rotary positions). It has
random weights in float64, which keeps rounding apart from real differences, and windows of a few tokens. The check
takes less than three seconds; rank 0 makes it before weights are loaded.

Of a family that `models/trainable.py` does not list, the copy has more layers, for options such as "each 8th layer has
full attention". Before a start, a launcher makes this check too, in a process, and the doctor:
`python -m areal_rloo.models.equality FOLDER TOKENS`.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from areal_rloo.errors import ModelError
from areal_rloo.models.attention import PackedLayout
from areal_rloo.models.files import check_tokens, model_folder, reading_model
from areal_rloo.models.loading import PACKED_ATTENTION, switch_dropout_off
from areal_rloo.models.policy import Policy
from areal_rloo.models.sizes import Sizes
from areal_rloo.models.stored import stored_parameters
from areal_rloo.models.trainable import TESTED_ONES, check_policy, check_trainable, rotary_options, tested
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_LENGTHS = [21, 5, 13]  # longer and shorter than the window
_WINDOW = 8
_WINDOWS = re.compile(r"window|chunk")  # names of options that are numbers of tokens
_ORIGINAL = re.compile(r"window|chunk|^original_max_position")
_VOCABULARY = 97
_NUM_LAYERS, _NUM_LAYERS_UNLISTED = 4, 16
_HEAD_DIM_UNLISTED, _MOST_HEAD_DIM = 32, 1024
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
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    listed = tested(config.to_dict())
    if listed:
        with reading_model(path):
            model = small_model(config)
            difference, seen = compare(model)
    else:
        check_policy("model.path", path, config.to_dict(), context_tokens=context_tokens)  # with the default options
        model, difference, seen = _compared(path, config)
    if beside := model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        raise ModelError(
            f"model.path: {path}: {min(beside)} is no parameter, but part of the weights; expected parameters alone, "
            "which the learner trains, broadcasts and saves; take another model"
        )
    if not seen > _LEAST_NATS:
        raise ModelError(
            f"model.path: {path}: logprobs of a {config.model_type} model differ by only {seen:.2g} nats if a sequence "
            f"sees its neighbours, expected more than {_LEAST_NATS}, or the check of packed rows proves nothing; take "
            "another model"
        )
    if not difference < _MOST_NATS:
        raise ModelError(
            f"model.path: {path}: logprobs of a packed row differ by {difference:.2g} nats from those of transformers "
            f"{transformers.__version__}, expected less than {_MOST_NATS}; the learner cannot train this "
            "model; take another model"
        )
    if not listed:
        logger.warning(
            "%s is a %s model, which no test compares with transformers; a small copy with random weights has the "
            "logprobs of transformers; the memory for activations is estimated as that of a Llama",
            *(path, config.model_type),
        )


def _compared(path: str, config: PreTrainedConfig) -> tuple[PreTrainedModel, float, float]:
    """Make and compare the small copy of an unlisted family; the learner cannot train what fails in any way.

    The heads of the copy are small, or have their own size if the smaller ones fail: other options may depend on it.
    """
    try:
        model = small_model(config, most_head_dim=_HEAD_DIM_UNLISTED)
        difference, seen = compare(model)
        if difference < _MOST_NATS and seen > _LEAST_NATS:
            return model, difference, seen
    except Exception:  # noqa: BLE001 - the second attempt decides
        pass
    try:
        model = small_model(config)
        return model, *compare(model)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model.path: {path} is a {config.model_type} model, and the check whether the learner computes its "
            f"logprobs fails: transformers' code for it does not run with the learner's attention "
            f"({type(error).__name__}: {reason}); take a model of {TESTED_ONES}"
        ) from error


def small_model(config: PreTrainedConfig, *, most_head_dim: int = _MOST_HEAD_DIM) -> PreTrainedModel:
    """Make a small random float64 model of this architecture with transformers' own attention, in eval mode.

    Equal arguments give equal weights. Raises ValueError for heads of more than `_MOST_HEAD_DIM` numbers.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            _small(config, most_head_dim), dtype=torch.float64, attn_implementation="eager"
        )
        _randomize(model.eval())
    return model


def compare(model: PreTrainedModel) -> tuple[float, float]:
    """Return two largest differences in nats of a model of `small_model`.

    The first is between a packed row and transformers' forward of each sequence alone. The second is between this
    forward and that of all sequences as a single sequence, which a wrong layout would give.
    """
    switch_dropout_off(model)
    with torch.no_grad():
        ids = (torch.arange(sum(_LENGTHS)) * 37 + 5) % _VOCABULARY
        alone = torch.cat([_own_logprobs(model, part)[1:] for part in ids.split(_LENGTHS)])
        together = torch.cat([part[1:] for part in _own_logprobs(model, ids).split(_LENGTHS)])
        packed = _packed_logprobs(_as_loaded(model), ids)
    return float((packed - alone).abs().max()), float((together - alone).abs().max())


def _as_loaded(model: PreTrainedModel) -> PreTrainedModel:
    """Build the model as `load_policy` does, with the same weights, in train mode as with gradient checkpointing.

    Some classes take a name of an attention only when they are built, and then mask nothing without calling it.
    """
    config = copy.deepcopy(model.config)
    with torch.random.fork_rng(devices=[]):  # a run's random numbers stay as they are
        loaded: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=model.dtype, attn_implementation=PACKED_ATTENTION
        )
    loaded.load_state_dict(model.state_dict())
    switch_dropout_off(loaded)
    loaded.train()
    return loaded


def _small(config: PreTrainedConfig, most_head_dim: int) -> PreTrainedConfig:
    """Copy a config with few layers of each type, few heads, short windows and a small vocabulary."""
    small: Any = copy.deepcopy(config)
    sizes = Sizes.of(config.to_dict())
    assert sizes is not None, "the learner trains families whose config.json has all sizes"
    heads, kv_heads, size = sizes.num_heads, sizes.num_kv_heads, min(sizes.head_dim, most_head_dim)
    if sizes.head_dim > _MOST_HEAD_DIM:
        raise ValueError(f"heads of {sizes.head_dim} numbers, expected at most {_MOST_HEAD_DIM}")
    if size < sizes.head_dim and isinstance(getattr(config, "head_dim", None), int):
        small.head_dim = size
    small.vocab_size = _VOCABULARY
    small.num_attention_heads = 4
    small.num_key_value_heads = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    small.hidden_size = 4 * size
    small.intermediate_size = 8 * size
    small.num_hidden_layers = number = _NUM_LAYERS if tested(config.to_dict()) else _NUM_LAYERS_UNLISTED
    for name, value in vars(small).items():
        if isinstance(value, list) and len(value) == sizes.num_layers and not isinstance(value[0], (list, dict)):
            setattr(small, name, _some_of_each(value, number))  # layer_types, or no_rope_layers of smollm3: 0 or 1
    kinds = {rotary.get("rope_type", rotary.get("type")) for rotary in rotary_options(config.to_dict())}
    _shrink_windows(vars(small), _WINDOWS if "longrope" in kinds else _ORIGINAL)  # longrope has other angles beyond it
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, 0)
    made: PreTrainedConfig = small
    return made


def _shrink_windows(options: dict[str, Any], names: re.Pattern[str]) -> None:
    """Shorten options with these names, also those in a section of the config, to a few tokens."""
    for name, value in options.items():
        if isinstance(value, dict):
            _shrink_windows(value, names)
        elif names.search(str(name)) and not name.endswith("layers") and type(value) is int and value > _WINDOW:
            options[name] = _WINDOW


def _some_of_each(kinds: list[Any], number: int) -> list[Any]:
    """Return the first kinds of layers, for this number of layers, or some of each kind if these lack any."""
    covered = len(kinds) >= number and set(kinds[:number]) == set(kinds)
    return (list(kinds) if covered else sorted(set(kinds)) * number)[:number]


def _randomize(model: PreTrainedModel) -> None:
    """Draw weights that keep the size of activations, so positions, windows and caps change the logprobs."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.rand_like(parameter) - 0.5)


def _own_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Compute the logprob of each token, [num_tokens] float64, with the model's own attention and logits.

    The first token has none, and gets 0.
    """
    log_p = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), log_p.gather(1, ids[1:, None])[:, 0]])


def _packed_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Compute the same for all sequences in a row, as a train step does: [num_tokens - num_sequences] float64."""
    ends = torch.tensor(_LENGTHS).cumsum(0) - 1
    predicts = torch.tensor([place for place in range(len(ids)) if place not in ends])
    layout = PackedLayout.of_lengths(_LENGTHS, ids.device)
    policy = Policy(model, temperature=1.0, dtype=torch.float32)
    logprobs: Tensor = policy(ids, layout, predicts, ids[predicts + 1])[0]
    return logprobs


def main(arguments: Sequence[str]) -> int:
    """Check a folder: with `weights` its tensors too, with `tokens` its tokenizer; print the error in a line."""
    folder, context_tokens, *more = arguments
    try:
        check_equality(folder, context_tokens=int(context_tokens))
        if "weights" in more:
            stored_parameters("model.path", Path(folder))
        if "tokens" in more:
            check_tokens(folder)
    except ModelError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
