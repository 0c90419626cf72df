"""New weights, from the learner to the rollout workers.

`broadcast` is the learner's end: versions on their way, with the statistics in `counts`. `offers` decides who is
offered which version, by its `commands`. `receive` is the worker's end. `manifest` lays tensors into buckets, and
defines notices. `fingerprint` takes the samples that prove a version. Two transports: `shared_memory` on a single host,
`collective` over torch.distributed (Gloo, NCCL), whose ranks meet in `rendezvous`.
"""

from typing import TYPE_CHECKING

from areal_rloo.exports import exports_of

if TYPE_CHECKING:
    from areal_rloo.weights.broadcast import Broadcaster, SendTransport
    from areal_rloo.weights.collective import CollectiveReader, CollectiveSender
    from areal_rloo.weights.manifest import Manifest, Notice, TensorSpec, build_manifest, checksum, gather, views
    from areal_rloo.weights.offers import Offers
    from areal_rloo.weights.receive import Receiver
    from areal_rloo.weights.shared_memory import SharedMemoryReader, SharedMemorySender

__all__ = [
    "Broadcaster",
    "CollectiveReader",
    "CollectiveSender",
    "Manifest",
    "Notice",
    "Offers",
    "Receiver",
    "SendTransport",
    "SharedMemoryReader",
    "SharedMemorySender",
    "TensorSpec",
    "build_manifest",
    "checksum",
    "gather",
    "views",
]

__getattr__ = exports_of(__name__)
