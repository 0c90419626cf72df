"""Make the start of a server cheaper. Most of a start is imports; areal_rloo_sglang.pth loads this file before them.

Garbage is collected more rarely. With AREAL_RLOO_SGLANG_FORKS=1, which tests set, SGLang forks the scheduler and the
detokenizer from the server, which has imported all modules. Otherwise SGLang spawns both, because a process that uses
a GPU cannot be forked.
"""

import gc
import multiprocessing
import os

gc.set_threshold(100_000, 50, 1000)
if os.environ.get("AREAL_RLOO_SGLANG_FORKS") == "1":
    _set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: _set_start_method("fork", force)
