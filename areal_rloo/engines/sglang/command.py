"""The options and environment variables of an SGLang server."""

from __future__ import annotations

import os

from areal_rloo.config import argument_name
from areal_rloo.engines.server.api import Arguments, ServerPlan
from areal_rloo.engines.server.process import in_words

_CORES = "SGLANG_CPU_OMP_THREADS_BIND"  # CPU cores of each rank
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_CPU: dict[str, str | float | bool | None] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "sleep-on-idle": True,  # without this, an idle server keeps a core busy
    "mem-fraction-static": 0.3,
}


def command_line(arguments: Arguments, plan: ServerPlan, *, port: int) -> list[str]:
    """Return the server's options: our defaults, then the user's arguments, then fixed options."""
    chosen: dict[str, str | float | bool | None] = {
        "dtype": plan.dtype,
        "max-running-requests": plan.num_slots,
        "enable-metrics": True,
        "skip-server-warmup": True,
        "disable-radix-cache": not plan.prefix_cache,
    }
    # A little more than needed: SGLang reserves a few tokens of the context.
    context_tokens = plan.context_tokens + 16
    if plan.model_context_tokens is None or context_tokens < plan.model_context_tokens:
        chosen["context-length"] = context_tokens
    if plan.sleeps and plan.device != "cpu":
        chosen["enable-memory-saver"] = True
    if plan.device != "cpu":  # by itself, SGLang records up to 48 requests on a GPU of 24 GB, and 32 on one of 48 GB
        chosen["cuda-graph-max-bs-decode"] = plan.num_slots
    if plan.device == "cpu":
        chosen |= _CPU
        chosen["max-total-tokens"] = plan.num_slots * context_tokens
    chosen |= {argument_name(name): value for name, value in arguments.items()}
    chosen |= {
        "model-path": str(plan.model_path),
        "device": plan.device,
        "tp-size": plan.tensor_parallel,
        "host": "127.0.0.1",
        "port": port,
        "weight-version": "0",
    }
    return in_words(chosen)


def environment(plan: ServerPlan) -> dict[str, str | None]:
    if plan.device != "cpu":  # the memory saver refuses expandable segments
        return dict.fromkeys(_ALLOCATOR) if plan.sleeps else {}
    changes: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": ""}
    if plan.num_threads:
        changes["OMP_NUM_THREADS"] = str(plan.num_threads)
    if plan.tensor_parallel > 1 and _CORES not in os.environ:  # SGLang does not start without this
        cores = sorted(os.sched_getaffinity(0))
        changes[_CORES] = "|".join(str(cores[rank % len(cores)]) for rank in range(plan.tensor_parallel))
    return changes
