"""The trainer of a file of TRL or ms-swift: the algorithm of every other setting."""

from __future__ import annotations

import re

from areal_rloo.errors import DataError
from areal_rloo.migrate.reading import Found, script_in
from areal_rloo.migrate.rules import Options

_BEFORE = ("rloo_k", "response_length", "kl_coef", "num_ppo_epochs", "total_episodes")  # names of old versions
_GRPO_ONLY = ("loss_type", "scale_rewards", "importance_sampling_level", "delta", "top_entropy_quantile")
_KIND = re.compile(r"\b(grpo|rloo)(?:\.py|Trainer|Config)?\b", re.IGNORECASE)
_COMMAND = re.compile(r"\btrl +(grpo|rloo)\b")


def with_algorithm(found: Found, given: Options) -> Options:
    """Add the trainer that a file of TRL names, and the default of ms-swift.

    Raises:
        DataError: a file of TRL names neither RLOO nor GRPO.
    """
    if found.system == "ms-swift":
        return given | {"advantage_estimator": given.get("advantage_estimator", "grpo")}
    if "trainer" in given:
        return given
    kinds = set(_COMMAND.findall(found.text)) or {kind.lower() for kind in _KIND.findall(found.text)}
    if any(name in given for name in _GRPO_ONLY):
        kinds = {"grpo"}
    if early := [name for name in _BEFORE if name in given]:
        raise DataError(
            f"expected the settings of TRL 1.0 or later, got those of an earlier RLOOConfig: {', '.join(early)}; "
            "rename rloo_k to num_generations, response_length to max_completion_length, kl_coef to beta, "
            "num_ppo_epochs to num_iterations, and total_episodes to num_train_epochs or max_steps"
        )
    if len(kinds) != 1:
        raise DataError(
            "expected a file for RLOO or GRPO, such as `trl rloo` or RLOOConfig(...), found "
            f"{'both' if kinds else 'neither'}; a comment `# trl rloo` or `# trl grpo` says which"
            f"{script_in(found.text)}"
        )
    return given | {"trainer": f"{kinds.pop().upper()}Trainer"}
