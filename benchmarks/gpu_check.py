"""Show on a GPU what no CPU can show, in about 20 minutes and without a network: `make gpu-check`.

    python benchmarks/gpu_check.py [--parts engine learner ...] [--wheels .gpu-wheels] [--output benchmarks/results/gpu]
    python benchmarks/gpu_check.py --device cpu --small --output FOLDER

Each part is a process with a limit of time: a part that fails or hangs does not stop the others, and the memory of the
GPU is free before the next. Results go to gpu_check.json and gpu_check.md of the output folder after each part; parts
of an earlier run that do not run now stay there. The exit code is 1 if a part failed. docs/gpu.md explains the page.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of the package: the check runs as a file, from any folder

from benchmarks import gpu_page, gpu_wheels

HERE = Path(__file__).resolve().parent
MARK = "gpu-part: "  # as in gpu_part.py, which needs torch
TITLES = {
    "tests": "do the tests marked gpu pass?",
    "attention": "is flash attention equal to attention in blocks?",
    "engine": "how fast is the embedded engine, and are its logprobs those of the learner?",
    "learner": "is the estimate of the learner's memory right, and how fast is a train step?",
    "compiled": "are compiled layers equal to eager layers, and faster?",
    "weights": "do NCCL groups form, and how fast do weights reach another process?",
    "run": "does a run train with learner and engine on one GPU?",
}
LIMITS_S = {"tests": 420, "engine": 420, "learner": 300, "compiled": 300, "run": 420}  # of a part
LIMIT_S = 180


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, to try the check out on a CPU")
    parser.add_argument("--output", type=Path, help="a folder; benchmarks/results/gpu for a GPU")
    parser.add_argument("--wheels", type=Path, default=HERE.parent / ".gpu-wheels", help="from `make gpu-wheels`")
    arguments = parser.parse_args()
    if arguments.output is None:
        if arguments.device == "cpu":
            parser.error("--device cpu: expected --output FOLDER, because these are no results of a GPU")
        arguments.output = HERE / "results" / "gpu"
    try:
        python = gpu_wheels.complete_python(arguments.wheels)
    except gpu_wheels.MissingError as error:
        sys.exit(f"error: {error}")
    if arguments.device == "cuda" and (why := _sees_no_gpu(python)):
        sys.exit(
            f"error: {why}; install a torch with CUDA, see nvidia-smi, or try the check: "
            "--device cpu --small --output FOLDER"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "gpu_check.json"
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    options = ["--device", arguments.device, *(["--small"] if arguments.small else [])]
    for name in (name for name in TITLES if name in arguments.parts):
        print(f"=== {name}: {TITLES[name]}", flush=True)
        results[name] = _run(python, name, options)
        path.write_text(json.dumps(results, indent=2) + "\n")
        (arguments.output / "gpu_check.md").write_text(gpu_page.render(results, TITLES))
        print(f"--- {name}: {gpu_page.VERDICTS[gpu_page.verdict(results[name])]}", flush=True)
    print(f"page: {arguments.output / 'gpu_check.md'}")
    sys.exit(any(gpu_page.verdict(results[name]) == "failed" for name in arguments.parts))


def _sees_no_gpu(python: str) -> str | None:
    """Return why torch can use no GPU; None if it can."""
    code = "import torch; assert torch.version.cuda, 'it is built for CPUs'; torch.zeros(1, device='cuda')"
    ended = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True)
    said = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
    return f"torch can use no GPU here: {said[0].removeprefix('AssertionError: ')}" if ended.returncode else None


def _run(python: str, name: str, options: list[str]) -> dict[str, Any]:
    """Run a part; return the last results that the part printed, and a failure if the part did not end by itself."""
    limit_s = LIMITS_S.get(name, LIMIT_S)
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    started = time.monotonic()
    said, others = "", list[str]()
    process = subprocess.Popen(
        [python, "-u", "-m", f"benchmarks.gpu_{name}", *options],
        env=os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None, "a pipe"
    end = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    for line in process.stdout:
        if line.startswith(MARK):
            said = line.removeprefix(MARK)
        else:
            others.append(line.rstrip())
            print(line, end="", flush=True)
    process.wait()
    late = not end.is_alive()
    end.cancel()
    ended = f"was ended after {limit_s} s" if late else f"ended with exit code {process.returncode}"
    result: dict[str, Any] = {"hardware": {}, "tables": {}, "notes": [], "short": [], "failures": []}
    if said:
        result |= json.loads(said)
    if not result.pop("done", False):
        result["failures"].append(f"the part {ended}; its last words: {' / '.join(others[-3:])[:500]}")
    seconds = round(time.monotonic() - started, 1)
    return {"at": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": seconds, **result}


if __name__ == "__main__":
    main()
