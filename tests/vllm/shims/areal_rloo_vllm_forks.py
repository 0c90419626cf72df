"""Make the start of a server cheaper. Most of a start is imports; a file of the same name (.pth) loads this one first.

Garbage is collected more rarely. With AREAL_RLOO_VLLM_FORKS=1, which tests set, vLLM forks the engine and the worker
from the server, which has imported all modules. Otherwise vLLM spawns both, because a process that uses a GPU cannot be
forked.
"""

import gc
import multiprocessing
import os

gc.set_threshold(100_000, 50, 1000)
if os.environ.get("AREAL_RLOO_VLLM_FORKS") == "1":
    _get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: _get_context("fork" if method == "spawn" else method)
