"""A policy as a Hugging Face model folder, which `from_pretrained` and every engine load."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FILE_BYTES = 5 * 10**9  # of one safetensors file; more go into several, with an index


def write_model(
    folder: Path,
    causal: PreTrainedModel,
    weights: dict[str, Tensor],
    *,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Weights, config, generation config and tokenizer.

    Args:
        folder: to be made.
        causal: whose configs are written; its own weights are not read.
        weights: by Hugging Face name, in CPU memory.
        tokenizer: of the model.
    """
    folder.mkdir(parents=True)
    dtype = next(iter(weights.values())).dtype
    config = type(causal.config).from_dict({**causal.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")})
    config.architectures = [type(causal).__name__]
    config.save_pretrained(folder)
    if causal.generation_config is not None:
        causal.generation_config.to_json_file(folder / "generation_config.json")  # not its judgement of the settings
    tokenizer.save_pretrained(folder)
    save_torch_state_dict(weights, folder, max_shard_size=_FILE_BYTES)
