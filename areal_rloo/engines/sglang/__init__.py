"""The engine that drives an SGLang server: `from areal_rloo.engines.sglang import SGLangEngine`.

| file | what it is |
|---|---|
| engine.py | the face: threads, futures, what the rollout worker calls |
| flight.py, flight_queue.py | one completion on its way; who waits and who is under way |
| sending.py | requests to the server and back |
| updates.py, swapping.py | the calls of an update; what holds after it |
| supervision.py | a server that died or hangs |
| server.py, process.py, client.py, capabilities.py | ours or somebody else's; its process; its HTTP; what it can do |
| model_folder.py | files of weights |
| state.py | what these know together |
"""

from areal_rloo.engines.sglang.capabilities import Capabilities
from areal_rloo.engines.sglang.engine import SGLangEngine, SGLangStatistics
from areal_rloo.engines.sglang.process import find_python
from areal_rloo.engines.sglang.server import find_api_key
from areal_rloo.engines.sglang.updates import BucketLayout, UpdateGroup

__all__ = [
    "BucketLayout",
    "Capabilities",
    "SGLangEngine",
    "SGLangStatistics",
    "UpdateGroup",
    "find_api_key",
    "find_python",
]
