"""The learner's samples of a version, for engines that receive the buckets themselves; runs on a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from areal_rloo.models.fingerprint import Digest, Sample, sampled_names, take_sample
from areal_rloo.weights.manifest import Manifest, views


@dataclass(frozen=True, slots=True)
class Sampler:
    """Takes the sample of a version from the buckets.

    Attributes:
        digests: of the engines' devices.
        num_ranks: of each tensor-parallel engine.
    """

    digests: tuple[Digest, ...]
    num_ranks: int

    def samples(self, manifest: Manifest, buckets: Sequence[Tensor], policy_version: int) -> tuple[Sample, ...]:
        """Take the fingerprints of the tensors in the sample of a version, by each digest; the buckets are on the CPU.

        A layer of 100 MB takes 0.06 s with sha256 and 0.3 s with tiles on a core.
        """
        tensors = dict(views(manifest, buckets))
        sampled = {name: tensors[name] for name in sampled_names(tensors, policy_version)}
        return tuple(take_sample(sampled, digest=digest, num_ranks=self.num_ranks) for digest in self.digests)
