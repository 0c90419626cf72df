"""The section `rollout`: the workers, their engines, sampling, and how a prompt becomes trajectories (an episode)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from areal_rloo.config.episode import EpisodeConfig, episode_mistakes
from areal_rloo.config.section import (
    AutoWorkers,
    Count,
    CountOrNone,
    LeaseCount,
    ManyCount,
    Natural,
    PositiveInt,
    Probability,
    ProcessBytes,
    Seconds,
    Section,
    Share,
    Temperature,
    Tokens,
    path_mistakes,
)
from areal_rloo.config.server import ServerConfig, server_mistakes


class SamplingConfig(Section, frozen=True):
    temperature: Temperature = 1.0  # divides the logits
    top_p: Probability = 1.0  # share of the probability that sampling keeps; below 1 needs allow_truncated
    top_k: Natural = 0  # sample from the k most likely tokens; 0: from all; above 0 needs allow_truncated
    max_new_tokens: Tokens = 512  # longest completion, all turns together
    min_new_tokens: Natural = 0  # shortest completion; above 0 needs allow_truncated
    # Accept top_p < 1, top_k > 0 or min_new_tokens > 0, although the learner's logprobs are of the full distribution.
    allow_truncated: bool = False


class EmbeddedConfig(Section, frozen=True):
    """The embedded engine. Evaluation uses rows of the same cache, and an own copy of the weights."""

    # Capacity of the key-value cache in tokens, for all completions; a single completion may use the whole cache.
    # When the cache is full, the completion submitted last is preempted and computed again later. null: 1.25 times
    # num_slots full contexts, limited to half of the free memory after loading the weights.
    cache_tokens: PositiveInt | None = None
    prefill_chunk_tokens: Tokens = 512  # prompt tokens computed between two decode steps while others decode


class RolloutConfig(Section, frozen=True):
    engine: Literal["embedded", "sglang", "vllm"] = "embedded"  # in the worker (embedded), or a server of its own
    num_workers: AutoWorkers = 1  # auto: as many as GPUs without a learner rank, or as hosts
    device: Literal["auto", "cpu", "cuda"] = "auto"  # of the engines; auto: GPUs if there are any
    num_threads: CountOrNone = 0  # CPU threads of a worker; 0: an equal share of the cores
    num_slots: LeaseCount = 64  # completions decoded together
    lease_ahead_samples: LeaseCount | None = None  # leased beyond the slots; null: the worker's share of a batch
    episode: EpisodeConfig = EpisodeConfig()
    num_reward_workers: Count = 2  # processes for scoring completions
    num_async_rewards: ManyCount = 64  # concurrent network-bound rewards
    reward_timeout_s: Seconds = 30.0  # of a reward, from the start of the call
    # Memory of a process for rewards, and of each process that a reward starts. A reward beyond it drops its sample.
    reward_memory_bytes: ProcessBytes = 8 * 2**30
    max_reward_failure_share: Share = 0.5  # of the last completions; above, the run ends with the first traceback
    sampling: SamplingConfig = SamplingConfig()
    tensor_parallel: Count = 1  # devices that share a copy of the model; servers only
    # Put each worker on the GPU of a learner rank. side_by_side: both compute all the time, and the estimate splits the
    # memory. in_turns: an engine frees the cache and waits during a train step; on CPUs, too, and then both use all
    # cores. auto: if there is one GPU, side by side; an embedded engine in turns if half contexts have no room.
    share_devices: Literal["auto", "side_by_side", "in_turns", "never"] = "auto"
    embedded: EmbeddedConfig = EmbeddedConfig()
    sglang: ServerConfig = ServerConfig()
    vllm: ServerConfig = ServerConfig()

    @property
    def server(self) -> ServerConfig | None:
        """The section of the server that `engine` names; None without a server."""
        return {"sglang": self.sglang, "vllm": self.vllm}.get(self.engine)

    @property
    def server_urls(self) -> tuple[str, ...]:
        """URLs of running servers, as many as workers; empty if the workers start engines."""
        return () if self.server is None else self.server.urls

    @property
    def shares(self) -> bool:
        """True if each worker is on the device of a learner rank; False before the launcher has resolved `auto`."""
        return self.share_devices == "side_by_side" or self.takes_turns

    @property
    def takes_turns(self) -> bool:
        """True if the workers' engines wait during a train step, and the learner otherwise."""
        return self.share_devices == "in_turns"


def rollout_mistakes(rollout: RolloutConfig, context_tokens: int, wire_host: str, transport: str) -> Iterator[str]:
    """Check dependent options; give the text of each error. `context_tokens`: longest prompt plus completion."""
    yield from episode_mistakes("rollout.episode", rollout.episode)
    yield from _sampling_mistakes(rollout.sampling)
    for engine, section in (("sglang", rollout.sglang), ("vllm", rollout.vllm)):
        yield from path_mistakes(f"rollout.{engine}.python", section.python)
    yield from _sharing_mistakes(rollout, transport)
    if rollout.engine != "embedded" and (server := rollout.server) is not None:
        yield from server_mistakes(
            rollout.engine,
            server,
            num_workers=rollout.num_workers,
            wire_host=wire_host,
            transport=transport,
            sleeps=rollout.takes_turns,
            context_tokens=context_tokens,
        )
        return
    if rollout.tensor_parallel != 1:
        yield (
            f"rollout.tensor_parallel: expected 1 with rollout.engine=embedded, got {rollout.tensor_parallel}; "
            "set rollout.engine to sglang or vllm"
        )
    cache_tokens = rollout.embedded.cache_tokens
    if cache_tokens is not None and cache_tokens < context_tokens:
        yield (
            f"rollout.embedded.cache_tokens: expected at least data.max_prompt_tokens and the longest completion "
            f"together = {context_tokens}, got {cache_tokens}; raise it, or set null for the default"
        )


def _sharing_mistakes(rollout: RolloutConfig, transport: str) -> Iterator[str]:
    asked = rollout.share_devices
    wrong: dict[str, str] = {}  # with the correction
    if rollout.tensor_parallel != 1:
        wrong[f"rollout.tensor_parallel={rollout.tensor_parallel}"] = "rollout.tensor_parallel=1"
    if transport == "collective":
        wrong["weights.transport=collective"] = "weights.transport=auto"
    if rollout.shares and wrong:
        yield (
            f"rollout.share_devices: expected never with {' and '.join(wrong)}, got {asked}; sharing a GPU needs "
            "tensor_parallel=1, and NCCL connects no two processes on a GPU; set " + " ".join(wrong.values())
        )
    if rollout.takes_turns and rollout.server_urls:
        yield (
            f"rollout.share_devices: expected another value with rollout.{rollout.engine}.urls, got in_turns; only a "
            "server that its worker starts sleeps during train steps; leave out the urls, or set auto"
        )


def _sampling_mistakes(sampling: SamplingConfig) -> Iterator[str]:
    if sampling.min_new_tokens > sampling.max_new_tokens:
        yield (
            f"rollout.sampling.min_new_tokens: expected at most max_new_tokens={sampling.max_new_tokens}, "
            f"got {sampling.min_new_tokens}"
        )
    if (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_new_tokens > 0) and not sampling.allow_truncated:
        yield (
            f"rollout.sampling: expected top_p=1, top_k=0 and min_new_tokens=0, got {sampling.top_p}, {sampling.top_k} "
            f"and {sampling.min_new_tokens}; a truncated distribution does not match the learner's logprobs; set "
            "rollout.sampling.allow_truncated=true to accept this"
        )
