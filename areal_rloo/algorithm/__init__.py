"""The mathematics alone, on tensors and integers: no models, no processes, no files.

In the order of a step: `staleness` (needs no torch), `normalization`, `kl`, `behaviour_weight`, `loss`, `diagnostics`.
`own_parts` has the user's functions in place of some of them, `own_function` calls such a function. The package imports
a public name on first use, because `intake` reads `staleness` and must not import torch.
"""

from typing import TYPE_CHECKING

from areal_rloo.exports import exports_of

if TYPE_CHECKING:
    from areal_rloo.algorithm.behaviour_weight import BehaviourWeights, behaviour_weights, interpolated_proximal
    from areal_rloo.algorithm.kl import KLTerm, adapted_coefficient, kl_estimate
    from areal_rloo.algorithm.loss import LossOutput, TokenOutcomes, policy_loss, sample_weights, written_by_policy
    from areal_rloo.algorithm.normalization import normalize, shape_rewards, token_returns
    from areal_rloo.algorithm.own_parts import OwnAdvantages, OwnLoss, OwnWeights
    from areal_rloo.algorithm.staleness import within_bound

__all__ = [
    "BehaviourWeights",
    "KLTerm",
    "LossOutput",
    "OwnAdvantages",
    "OwnLoss",
    "OwnWeights",
    "TokenOutcomes",
    "adapted_coefficient",
    "behaviour_weights",
    "interpolated_proximal",
    "kl_estimate",
    "normalize",
    "policy_loss",
    "sample_weights",
    "shape_rewards",
    "token_returns",
    "within_bound",
    "written_by_policy",
]

__getattr__ = exports_of(__name__)
