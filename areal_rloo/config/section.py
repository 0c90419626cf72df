"""What every section of the config is made of: an immutable struct without unknown keys, and bounded numbers."""

from __future__ import annotations

from typing import Annotated

import msgspec

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
AutoInt = Annotated[int, msgspec.Meta(ge=0, extra={"auto": True})]  # the word auto is 0: the launcher fills it in
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
FiniteFloat = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Probability = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the config file: immutable, keyword-only, no unknown keys."""
