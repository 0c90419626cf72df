"""The reference policy of a KL term: frozen, on its own device or in CPU memory between uses.

The learner asks it once a train step, before the policy's own forward passes, so the two need not lie on a GPU at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from areal_rloo.models.policy import Policy


class Reference:
    """A frozen policy and where it lives."""

    def __init__(self, policy: Policy, *, device: torch.device, offload: bool) -> None:
        """`offload` keeps the weights in CPU memory between uses; `device` is where they are used."""
        self._policy = policy.requires_grad_(False)
        self._device = device
        self._home = torch.device("cpu") if offload else device
        self._move(self._home)

    @property
    def policy(self) -> Policy:
        """Where its weights lie now; to save them."""
        return self._policy

    @contextmanager
    def loaded(self) -> Iterator[Policy]:
        """The policy on its device, for as long as the block runs."""
        self._move(self._device)
        try:
            yield self._policy
        finally:
            self._move(self._home)

    @torch.no_grad()
    def refresh(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take these weights, given by Hugging Face name, sharded as its own are."""
        own = dict(self._policy.causal.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)

    def _move(self, device: torch.device) -> None:
        self._policy.to(device)
