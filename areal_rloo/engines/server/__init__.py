"""The engine that drives a server process, whatever the server's API: `ServerEngine`.

`api` names the calls and facts that differ between servers; `engines/sglang` and `engines/vllm` implement them.
`engine` is the public class: tasks on the worker's event loop. `flights` holds each completion in progress and the
queue. `sending` exchanges requests and answers with the server, and holds the shared state; `answers` checks every
number of an answer. `updates` loads new weights, and `readback` compares digests of a server's parameters with the
published weights. `turns` lets the server sleep while a learner on the same devices steps. `supervision` opens a
managed or an external server, and restarts a crashed or hung server. `process` starts the process, `client` speaks
HTTP. `model_folder` reads and writes weight files.
"""

from areal_rloo.engines.server.api import BucketLayout, ServerKind, ServerPlan, UpdateGroup
from areal_rloo.engines.server.engine import ServerEngine, ServerStatistics

__all__ = [
    "BucketLayout",
    "ServerEngine",
    "ServerKind",
    "ServerPlan",
    "ServerStatistics",
    "UpdateGroup",
]
