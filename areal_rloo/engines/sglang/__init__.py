"""SGLang as a server engine: `ServerEngine(SGLang(), ...)` of `areal_rloo.engines.server`.

`api` is the public class, with the calls of a connection. `capabilities` checks the server's features. `command` makes
the options of a managed server. `completions` makes bodies of requests and reads answers. `weights` loads new weights,
and `readback` compares a sample of the server's parameters with them.
"""

from areal_rloo.engines.sglang.api import SGLang
from areal_rloo.engines.sglang.capabilities import Capabilities

__all__ = ["Capabilities", "SGLang"]
