"""Which tokens of a completion the policy wrote, where tools and users speak between its turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def written_by_policy(spans: Sequence[int], num_tokens: int) -> npt.NDArray[np.bool_]:
    """[num_tokens] bool: the first span is the policy's, the second somebody else's, and so on; no spans: all its own.

    Only these tokens have a behaviour policy, so only these may have a gradient or a KL.
    """
    if not spans:
        return np.ones(num_tokens, dtype=np.bool_)
    mask: npt.NDArray[np.bool_] = np.repeat(np.arange(len(spans)) % 2 == 0, spans)
    assert len(mask) == num_tokens, f"spans {spans} of {num_tokens} tokens"
    return mask
