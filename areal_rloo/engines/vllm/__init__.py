"""vLLM as a server engine: `ServerEngine(VLLM(), ...)` of `areal_rloo.engines.server`.

`api` is the public class, with the calls of a connection. `capabilities` checks the server's features. `command` makes
the options of a managed server. `completions` makes bodies of requests and reads answers. `weights` loads new weights,
and compares a sample of the server's parameters with them. `inside` runs in vLLM's own processes.
"""

from areal_rloo.engines.vllm.api import VLLM
from areal_rloo.engines.vllm.capabilities import Capabilities

__all__ = ["VLLM", "Capabilities"]
