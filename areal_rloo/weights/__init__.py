"""New weights, from the learner to the rollout workers.

`broadcast` is the learner's end: versions on their way. `offers` decides who is offered which version. `receive` is the
worker's end. `manifest` lays tensors into buckets, and defines notices. `fingerprint` takes the samples that prove a
version. Two transports: `shared_memory` on a single host, `collective` over torch.distributed (Gloo, NCCL), whose ranks
meet in `rendezvous`.
"""
