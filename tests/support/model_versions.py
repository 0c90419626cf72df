"""Versions of a small model, and the reference logprobs of transformers for a completion of several versions."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_rloo.trajectory import Completion


def model_of(folder: Path, *, factor: float = 1.0) -> PreTrainedModel:
    """Return transformers' model of a checkpoint with every weight times the factor: another version."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


@torch.no_grad()
def cached_logprobs(
    models: Mapping[int, PreTrainedModel],
    prompt: tuple[int, ...],
    completion: Completion,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """On one growing cache, each stretch by the weights of the version that tagged what they gave; [num_tokens]."""
    tokens, versions = completion.tokens.tolist(), completion.versions.tolist()
    if not tokens:
        return torch.empty(0)
    read_by = [versions[0]] * len(prompt) + versions[1:]
    fed = iter([*prompt, *tokens[:-1]])
    cache, logits = None, []
    for version, stretch in groupby(read_by):
        ids = torch.tensor([[next(fed) for _ in stretch]])
        output = models[version](ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[0])
    logprobs = (torch.cat(logits)[len(prompt) - 1 :] / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
