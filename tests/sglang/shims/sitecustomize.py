"""Make the starts of short-lived servers cheaper: imports, most of what they do, take half of the time then.

Collects garbage more rarely, and forks the scheduler and the detokenizer from the server, which has imported all they
need. SGLang would spawn both, because a process cannot be forked once it uses a GPU.
"""

import gc
import multiprocessing

gc.set_threshold(100_000, 50, 1000)
_set_start_method = multiprocessing.set_start_method
multiprocessing.set_start_method = lambda method, force=False: _set_start_method("fork", force)
