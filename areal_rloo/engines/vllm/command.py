"""The options and environment variables of a vLLM server."""

from __future__ import annotations

import os
from pathlib import Path

from areal_rloo.config import argument_name
from areal_rloo.engines.server.api import Arguments, ServerPlan
from areal_rloo.engines.server.process import in_words

_INSIDE = Path(__file__).parent / "inside"
_CORES = "VLLM_CPU_OMP_THREADS_BIND"  # CPU cores of each rank
_CPU: dict[str, str | float | bool | None] = {"enforce-eager": True, "kv-cache-memory-bytes": 2**30}


def command_line(arguments: Arguments, plan: ServerPlan, *, port: int) -> list[str]:
    """Return the server's options: our defaults, then the user's arguments, then fixed options."""
    chosen: dict[str, str | float | bool | None] = {
        "dtype": plan.dtype,
        "max-num-seqs": plan.num_slots,
        "max-model-len": min(plan.context_tokens, plan.model_context_tokens or plan.context_tokens),
        "generation-config": "vllm",  # the model's own may change the sampling
        "no-enable-prefix-caching": not plan.prefix_cache,
        "disable-uvicorn-access-log": True,
    }
    if plan.sleeps and plan.device != "cpu":
        chosen["enable-sleep-mode"] = True
    if plan.device == "cpu":
        chosen |= _CPU
    chosen |= {argument_name(name): value for name, value in arguments.items()}
    chosen |= {
        "tensor-parallel-size": plan.tensor_parallel,
        "host": "127.0.0.1",
        "port": port,
        "enable-scale-out": True,
        "enable-prompt-tokens-details": True,
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": "areal_rloo_vllm.Weights",
        "middleware": "areal_rloo_vllm.Guard",
    }
    return in_words(chosen)


def environment(plan: ServerPlan) -> dict[str, str]:
    paths = [str(_INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_SERVER_DEV_MODE": "1",  # the calls that pause and update
        "VLLM_NO_USAGE_STATS": "1",
        "AREAL_RLOO_VLLM_MANAGED": "1",  # the workers end with the server
    }
    if plan.device != "cpu":
        return changes
    changes["CUDA_VISIBLE_DEVICES"] = ""
    changes[_CORES] = os.environ.get(_CORES, "nobind")
    if plan.num_threads:
        changes["OMP_NUM_THREADS"] = str(plan.num_threads)
    return changes
