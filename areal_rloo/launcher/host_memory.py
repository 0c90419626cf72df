"""The memory of a host in a run, by the estimate: states in CPU memory, checkpoints, engines on CPUs, weights to send.

Not included: the cache of an engine on a CPU, and the programs themselves. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_rloo.config import Config
from areal_rloo.launcher.placement import Host, Placement
from areal_rloo.learner.memory import estimate, number_bytes, trained_numbers
from areal_rloo.models.sizes import Sizes

_WIDE = 4  # bytes of a float32


def host_parts(config: Config, placement: Placement, model: Sizes | None, num_parameters: int) -> dict[str, float]:
    """Return the bytes by part on the host with the most; the config has no `auto`.

    Without the sizes of the model, activations and adapters are not counted.
    """
    learner = _Learner(config, model, num_parameters, on_gpus=bool(placement.learner[0].gpu_ids))
    hosts = [_parts_on(host, learner, placement) for host in placement.used_hosts]
    return max(hosts, key=lambda parts: sum(parts.values()))


def _parts_on(host: Host, learner: _Learner, placement: Placement) -> dict[str, float]:
    config, one = learner.config, number_bytes(learner.config) * learner.num_parameters
    num_ranks = sum(seat.host == host for seat in placement.learner)
    on_cpus = sum(seat.host == host and not seat.gpu_ids for seat in placement.workers)
    begins, same_host = placement.learner_host == host, len(placement.used_hosts) == 1
    on_gpus = sum(seat.host == host and bool(seat.gpu_ids) for seat in placement.workers)
    starts_servers = config.rollout.server is not None and not config.rollout.server_urls
    by_files = starts_servers and config.weights_transport(same_host=same_host) == "shared_memory"
    merges = starts_servers and config.publishes_adapters
    sleep = config.rollout.engine == "vllm" and config.rollout.takes_turns  # SGLang's stay on the GPU
    parts = {
        "learner": learner.held_bytes(num_ranks),
        "loads and checkpoints": learner.copied_bytes(num_ranks, begins=begins),
        "engines": 0 if config.rollout.server_urls else on_cpus * config.copies_of_weights * one,
        "versions of the weights": 2 * learner.published_bytes if begins else 0,  # the newest, and the next
        "files of servers": on_gpus * one if by_files or merges else 0,
        "merged weights": on_gpus * one if merges else 0,
        "weights of sleeping servers": on_gpus * one if sleep else 0,
    }
    return {part: size for part, size in parts.items() if size}


@dataclass(frozen=True, slots=True)
class _Learner:
    config: Config
    model: Sizes | None
    num_parameters: int
    on_gpus: bool

    @property
    def num_trained(self) -> int:
        if self.config.learner.lora is None:
            return self.num_parameters
        return 0 if self.model is None else trained_numbers(self.model, self.config)

    @property
    def moments_bytes(self) -> int:
        return self.num_trained * (4 if self.config.learner.optimizer.state_dtype == "bfloat16" else 8)

    @property
    def published_bytes(self) -> int:
        if self.config.publishes_adapters:
            return _WIDE * self.num_trained
        return number_bytes(self.config) * self.num_parameters

    def held_bytes(self, num_ranks: int) -> float:
        """Return the bytes of ranks: on CPUs of everything, on GPUs of the parts that an option keeps in CPU memory."""
        learner, reference = self.config.learner, self.config.model.reference
        if not self.on_gpus and self.model is not None:
            parts = estimate(self.model, self.config, on_gpu=False)
            return num_ranks * sum(parts.values())
        whole = not self.on_gpus or learner.offload == "parameters"
        held = self.moments_bytes if whole or learner.offload == "optimizer" else 0
        held += _WIDE * (self.num_parameters + self.num_trained) if whole else 0
        if reference is not None and self.config.algorithm.kl.coefficient > 0 and (whole or reference.offload):
            held += _WIDE * self.num_parameters
        return held * num_ranks * learner.num_replicas / learner.num_ranks

    def copied_bytes(self, num_ranks: int, *, begins: bool) -> float:
        """Return the bytes of the copies for a checkpoint, or of the whole weights that rank 0 reads at the start.

        Tensors of a GPU are copied, those in CPU memory only if there is room. A single replica writes the states.
        `begins`: rank 0 is among these ranks, and also gathers the weights of the model unless it has them as they are.
        """
        learner, reference = self.config.learner, self.config.model.reference
        copied = 0.0
        if self.on_gpus and learner.offload != "parameters":
            refreshes = reference is not None and reference.refresh_every_n_versions is not None
            states = _WIDE * self.num_parameters * (2 if refreshes else 1) + self.moments_bytes
            copied = states * min(1.0, num_ranks * learner.num_replicas / learner.num_ranks)
        if begins and (self.on_gpus or learner.num_ranks > 1 or self.config.model.dtype != "float32"):
            copied += number_bytes(self.config) * self.num_parameters
        reads = begins and (self.on_gpus or learner.num_ranks > 1)
        return max(copied, _WIDE * self.num_parameters if reads else 0)
