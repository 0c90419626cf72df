"""The reference policy of a KL term: frozen, on its own device or in CPU memory between uses.

The learner asks it once a train step, before the policy's own forward passes, so the two need not lie on a GPU at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


class Reference:
    """A frozen policy and where it lives."""

    def __init__(self, model: PreTrainedModel, *, device: torch.device, offload: bool) -> None:
        """`offload` keeps the weights in CPU memory between uses; `device` is where they are used."""
        self._model = model.requires_grad_(False)
        self._device = device
        self._home = torch.device("cpu") if offload else device
        self._move(self._home)

    @property
    def model(self) -> PreTrainedModel:
        """The weights where they lie now; to save them."""
        return self._model

    @contextmanager
    def loaded(self) -> Iterator[PreTrainedModel]:
        """The model on its device, for as long as the block runs."""
        self._move(self._device)
        try:
            yield self._model
        finally:
            self._move(self._home)

    @torch.no_grad()
    def refresh(self, policy: PreTrainedModel) -> None:
        """Take the policy's weights of this moment."""
        for own, theirs in zip(self._model.parameters(), policy.parameters(), strict=True):
            own.copy_(theirs)

    def _move(self, device: torch.device) -> None:
        self._model.to(device)  # type: ignore[arg-type]
