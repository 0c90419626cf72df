"""Python's collector of reference cycles, in the process whose event loop serves all workers.

A collection of all objects takes 50 to 100 ms with the samples of 64 workers in flight, and no thread runs meanwhile.
By default one comes whenever the objects have grown by a quarter, several in a short train step, and all answers to the
workers wait. Few cycles are made here: young objects are collected often, and all of them every half minute.
"""

from __future__ import annotations

import gc
import threading
import time

_YOUNG, _NEVER = 1_000, 1_000_000  # a collection of ten times as many takes 3 to 30 ms
_ALL_EVERY_S = 30.0


def collect_rarely() -> None:
    """Leave out all objects of now, and collect all later ones every half minute."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _NEVER, _NEVER)
    threading.Thread(target=_collect, name="collector of cycles", daemon=True).start()


def _collect() -> None:
    while True:
        time.sleep(_ALL_EVERY_S)
        gc.collect()
