"""Collections of reference cycles in the learner: none of everything because objects grow, but cycles are freed."""

import subprocess
import sys

GROWS = """
import gc, weakref
from areal_rloo.learner import collector

class Cycle:
    def __init__(self): self.itself = self

collector._ALL_EVERY_S = 0.05
if {rarely}: collector.collect_rarely()
generations = []
gc.callbacks.append(lambda phase, info: generations.append(info["generation"]) if phase == "start" else None)
alive = [[number] for number in range(400_000)]  # samples in flight
grown = list(generations)
old = weakref.ref(Cycle())
gc.callbacks.clear()
print(grown.count(2), len(grown) > 3, flush=True)
"""


def _after(code: str, *, rarely: bool) -> list[str]:
    program = GROWS.replace("0.05", "60").format(rarely=rarely) + code
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


def test_samples_in_flight_cause_no_collection_of_everything() -> None:
    assert _after("", rarely=True) == ["0", "True"]
    num_full, _ = _after("", rarely=False)
    assert int(num_full) > 0, "Python alone collects everything"


def test_old_cycles_are_freed_all_the_same() -> None:
    waits = "import time\nends = time.monotonic() + 60\nwhile old() and time.monotonic() < ends: time.sleep(0.01)\n"
    program = GROWS.format(rarely=True) + waits + "print(old())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.split()[-1], done.stderr) == ("None", "")
