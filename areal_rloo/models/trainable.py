"""Check by config.json whether the learner trains a model, without torch: launchers and the learner call this."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_rloo.errors import ModelError, shown
from areal_rloo.models.folder import IN_LAYER, StoredTensor, check_precision, read_config
from areal_rloo.models.sizes import DERIVED_HEADS, Sizes

SERVED_FAMILIES = (  # by the embedded engine; engines/embedded/families.py has the differences
    *("qwen2", "qwen3", "llama", "mistral", "ministral", "gemma", "gemma2", "gemma3_text", "phi3"),
    *("olmo2", "olmo3", "smollm3", "granite", "glm", "glm4"),
)
TRAINED_FAMILIES = (  # tests/unit/learner/test_families.py compares each with transformers
    *SERVED_FAMILIES,
    *("arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gpt_neox", "helium", "hunyuan_v1_dense", "internlm3"),
    *("nanochat", "olmo", "phi", "seed_oss", "starcoder2", "vaultgemma"),
)
TESTED_ONES = f"one of the families tested with the learner: {', '.join(TRAINED_FAMILIES)}"
_CAPPED = ("gemma2", "gemma3_text", "nanochat", "vaultgemma")  # transformers caps their logits
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")  # positions alone decide the angles, not the rest of the row


def check_trainable(key: str, folder: Path, *, context_tokens: int) -> None:
    """Check family, positions and heads of a policy by its config.json, before any process loads it.

    `context_tokens`: of the longest sequence of the run.

    Raises:
        ModelError: the policy cannot be trained, or config.json cannot be read.
    """
    config = read_config(key, folder)
    check_policy(key, str(folder), config, context_tokens=context_tokens)
    size, num_heads, head_dim = (config.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    derived = head_dim is None and config["model_type"] in DERIVED_HEADS
    if derived and isinstance(size, int) and isinstance(num_heads, int):
        head_dim = size // num_heads if num_heads > 0 else 0
    kv_heads = config.get("num_key_value_heads")
    if isinstance(num_heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or num_heads % kv_heads):
        raise ModelError(
            f"{key}: {folder} has num_attention_heads={num_heads} and num_key_value_heads={kv_heads} in config.json; "
            "expected the second to divide the first, because as many queries share each key; take another model"
        )
    if isinstance(head_dim, int) and (head_dim < 2 or head_dim % 2):
        raise ModelError(
            f"{key}: {folder} has heads of {head_dim} numbers; expected an even number, because rotary positions turn "
            "pairs of numbers; take another model"
        )


def check_policy(key: str, path: str, config: Mapping[str, Any], *, context_tokens: int) -> None:
    """Raise ModelError if the logprobs of a model with this config.json would be wrong; as `check_trainable`."""
    if not tested(config):
        _check_dense(key, path, config, context_tokens)
    window = config.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ModelError(
            f"{key}: {path} has sliding_window {shown(window)} in config.json; expected a number of tokens, at least "
            "1, or null; take another model"
        )
    _check_forward(key, path, config)
    check_precision(key, path, config)
    for rotary in rotary_options(config):
        kind = rotary.get("rope_type", rotary.get("type", "default")) if isinstance(rotary, dict) else rotary
        longest = _longest_with_equal_angles(config, rotary) if isinstance(rotary, dict) else None
        if longest is not None and context_tokens <= longest:
            continue
        if longest is not None or kind == "longrope":
            raise ModelError(
                f"{key}: {path} has rotary positions of type {shown(kind)} with other angles beyond "
                f"{shown(longest)} tokens; expected sequences of at most as many, got up to {context_tokens} "
                "(data.max_prompt_tokens and rollout.sampling.max_new_tokens); shorten them, or take another model"
            )
        if kind not in ROTARY_TYPES:
            raise ModelError(
                f"{key}: {path} has rotary positions of type {shown(kind)} (rope_parameters or rope_scaling in "
                f"config.json); expected {', '.join(ROTARY_TYPES)}: with the others, a token's logprob depends on the "
                "length of the row; take another model"
            )


def check_shapes(key: str, folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Raise ModelError if a matrix in the files has another shape than config.json gives, for the families listed here.

    Not checked without every size in config.json: transformers knows the defaults.
    """
    config = read_config(key, folder)
    sizes = Sizes.of(config)
    named = [size for size in _SIZES if config.get(size) is not None]
    derived = ["head_dim"] if config["model_type"] in DERIVED_HEADS else []
    if sizes is None or not tested(config) or not {*_SIZES} <= {*named, *derived}:
        return
    for name, tensor in stored.items():
        expected = sizes.matrices.get(name.split(".")[-2]) if IN_LAYER.search(name) else None
        if expected is not None and len(tensor.shape) == 2 and tensor.shape != expected:
            given = ", ".join(f"{size}={shown(config[size])}" for size in named)
            raise ModelError(
                f"{key}: {folder} has {name} of shape {list(tensor.shape)}, expected {list(expected)} by {given} in "
                "config.json; download the model again"
            )


def tested(config: Mapping[str, Any]) -> bool:
    """Return False if only the check of a small copy (`models/equality.py`) can tell whether a family is trained."""
    return config.get("model_type") in TRAINED_FAMILIES


def _check_dense(key: str, path: str, config: Mapping[str, Any], context_tokens: int) -> None:
    """Refuse what the check of a small copy could not: experts, unknown sizes, more tokens than (learned) positions."""
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ModelError(f"{key}: {path} has no model_type in config.json; expected that of a model of transformers")
    family, instead = shown(config["model_type"]), f"take a model of {TESTED_ONES}"
    experts = next((name for name, value in config.items() if "expert" in name and value), None)
    if experts is not None:
        raise ModelError(
            f"{key}: {path} is a {family} model with {experts}={shown(config[experts])} in config.json, a mixture of "
            f"experts; the learner trains dense models; {instead}"
        )
    if Sizes.of(config) is None:
        raise ModelError(
            f"{key}: {path} is a {family} model whose config.json does not give every size of a decoder-only model "
            f"of text (hidden_size, num_attention_heads, ...); {instead}"
        )
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and context_tokens > positions:
        raise ModelError(
            f"{key}: {path} is a {family} model of {positions} positions (max_position_embeddings), expected sequences "
            f"of at most as many, got up to {context_tokens} (data.max_prompt_tokens and "
            f"rollout.sampling.max_new_tokens); shorten them, or {instead}"
        )


def _check_forward(key: str, path: str, config: Mapping[str, Any]) -> None:
    """Refuse options that make the learner's forward another than that of transformers, or not causal."""
    for option, causal in (("use_bidirectional_attention", False), ("is_causal", True)):
        if config.get(option) not in (None, causal):
            raise ModelError(
                f"{key}: {path} has {option}={shown(config[option])} in config.json; expected causal attention, "
                "because tokens are sampled one after the other; take another model"
            )
    cap, family = config.get("final_logit_softcapping"), config["model_type"]
    if cap is not None and family in TRAINED_FAMILIES and family not in _CAPPED:
        raise ModelError(
            f"{key}: {path} has final_logit_softcapping {shown(cap)} in config.json, which transformers ignores in a "
            f"{family} model, and engines may not; remove the key, or take another model"
        )


def _longest_with_equal_angles(config: Mapping[str, Any], rotary: Mapping[str, Any]) -> int | None:
    """Return up to which length all sequences have the same angles, if the type of positions depends on the length."""
    kind = rotary.get("rope_type", rotary.get("type"))
    longest: object = None
    if kind == "longrope":
        limits = [place.get("original_max_position_embeddings") for place in (rotary, config)]
        longest = min((limit for limit in limits if isinstance(limit, int)), default=None)
    elif kind == "dynamic" and config.get("model_type") == "hunyuan_v1_dense" and rotary.get("alpha"):
        longest = config.get("max_position_embeddings")  # alpha changes only the base, for every length
    return longest if isinstance(longest, int) else None


def rotary_options(config: Mapping[str, Any]) -> list[Any]:
    """Return all rotary options in a config.json, those of a type of layer too; not checked.

    Which of them transformers takes depends on the family and on other keys, so all of them have to be right.
    """
    found = [config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    return [
        *found,
        *(
            inner
            for rotary in found
            if isinstance(rotary, dict)
            for inner in rotary.values()
            if isinstance(inner, dict)
        ),
    ]
