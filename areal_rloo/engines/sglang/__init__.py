"""The engine that drives an SGLang server: `from areal_rloo.engines.sglang import SGLangEngine`.

`engine` is the public class: tasks on the worker's event loop. `flights` holds each completion in progress and the
queue. `sending` exchanges requests and answers with the server, and holds the shared state. `updates` loads new
weights, and `readback` compares a sample of the server's parameters with them. `server` opens a managed or an external
server, and restarts a crashed or hung server. `process` starts the process, `client` speaks HTTP and checks the
server's features. `model_folder` reads and writes weight files.
"""

from areal_rloo.engines.sglang.client import Capabilities
from areal_rloo.engines.sglang.engine import SGLangEngine, SGLangStatistics
from areal_rloo.engines.sglang.process import ServerPlan, find_python
from areal_rloo.engines.sglang.server import find_api_key
from areal_rloo.engines.sglang.updates import BucketLayout, UpdateGroup

__all__ = [
    "BucketLayout",
    "Capabilities",
    "SGLangEngine",
    "SGLangStatistics",
    "ServerPlan",
    "UpdateGroup",
    "find_api_key",
    "find_python",
]
