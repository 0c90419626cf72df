"""The GPU check on a CPU: the same parts with small models, their page, failures of parts, and missing packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_page, gpu_wheels

REPO = Path(__file__).resolve().parents[2]
ON_CPU = ("--device", "cpu", "--small")


def _check(folder: Path, *options: str) -> tuple[int, str, dict[str, dict]]:
    """Run the check; return the exit code, the page, and the results by part."""
    command = [sys.executable, str(REPO / "benchmarks" / "gpu_check.py"), "--output", str(folder), *options]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    page = folder / "gpu_check.md"
    assert page.exists(), ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.returncode, page.read_text(), json.loads((folder / "gpu_check.json").read_text())


@pytest.mark.rare
@pytest.mark.parametrize(
    ("parts", "columns"),
    [
        (
            ("tests", "attention", "engine"),
            ("outcome", "largest_relative_error", "over_generate", "share_of_bandwidth_limit", "engine_float32"),
        ),
        (("learner", "run"), ("estimated_over_measured", "mfu", "tflop_per_s", "samples_lost", "train_steps")),
        (("compiled", "weights"), ("largest_gap", "first_compiled_s", "shared_memory", "backend")),
    ],
)
def test_the_parts_run_on_a_cpu(tmp_path: Path, parts: tuple[str, ...], columns: tuple[str, ...]) -> None:
    code, page, results = _check(tmp_path, *ON_CPU, "--parts", *parts)
    assert (code, set(results)) == (0, set(parts)), page
    assert "No number of such a part is a number of a GPU" in page
    for name, result in results.items():
        assert (result["failures"], result["short"]) == ([], []), name
        assert result["hardware"]["torch"] == torch.__version__
        assert all(result["tables"].values()), name
        assert f"| {name} | " in page
    assert page.count("| not run |") == 7 - len(parts)
    rows = [row for result in results.values() for table in result["tables"].values() for row in table]
    assert set(columns) <= {column for row in rows for column in row}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "gpu_check.py"), "--output", str(tmp_path / "page")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1)
    assert ended.stderr.startswith("error: torch can use no GPU here: ")
    assert not (tmp_path / "page").exists()


def test_a_failed_part_is_named_and_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = """
import os, sys
cores = os.sched_getaffinity
def fail(process):
    if sys._getframe(1).f_code.co_name == "describe":  # of every part, at its beginning
        raise OSError("broken")
    return cores(process)
os.sched_getaffinity = fail
"""
    (tmp_path / "sitecustomize.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, page, results = _check(tmp_path, *ON_CPU, "--parts", "attention", "engine")
    assert (code, list(results)) == (1, ["attention", "engine"])
    for name, result in results.items():
        (failure,) = result["failures"]
        assert "broken" in failure
        assert f"- {name}: FAILED: {failure.replace('|', '/')}" in page
    assert page.count("| FAILED |") == 2


def test_results_of_a_cpu_need_a_folder_of_their_own() -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "gpu_check.py"), *ON_CPU]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "expected --output FOLDER" in ended.stderr


def test_a_missed_goal_is_no_failure_and_named() -> None:
    good = {"hardware": {"device": "H"}, "tables": {}, "notes": [], "short": [], "failures": [], "at": "", "seconds": 1}
    results = {
        "a": good,
        "b": {**good, "short": ["0.1 | goal 1"]},
        "c": {**good, "short": ["x"], "failures": ["wrong"]},
    }
    assert [gpu_page.verdict(result) for result in results.values()] == ["passed", "short", "failed"]
    page = gpu_page.render(results, dict.fromkeys("abcd", "?"))
    assert "- b: goal not reached: 0.1 / goal 1" in page and "- c: FAILED: wrong" in page
    assert "| d | ? | not run | |" in page
    assert "number of a GPU" not in page


def test_packages_come_from_the_machine_or_the_carried_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment sees the packages of ours, which is an environment itself; a missing wheel is named."""
    assert gpu_wheels.complete_python(tmp_path / "unused") == sys.executable
    assert not (tmp_path / "unused").exists(), "nothing was missing"
    monkeypatch.setattr(gpu_wheels, "THERE", {"a-heavy-package"})
    monkeypatch.setattr(gpu_wheels, "needed", lambda: ["a-heavy-package", "a-package-of-the-gpu-check"])
    with pytest.raises(gpu_wheels.MissingError, match=r"has no a-heavy-package, .* take the Python that has them"):
        gpu_wheels.complete_python(tmp_path / "unused")
    assert not (tmp_path / "unused").exists(), "of another Python perhaps, which this one would take later"
    monkeypatch.setattr(gpu_wheels, "needed", lambda: ["torch", "a-package-of-the-gpu-check"])
    folder = tmp_path / "wheels"
    with pytest.raises(gpu_wheels.MissingError, match=r"a-package-of-the-gpu-check, and .*wheels does not give them"):
        gpu_wheels.complete_python(folder)
    _write_wheel(folder, "a_package_of_the_gpu_check")
    python = gpu_wheels.complete_python(folder)
    code = "import torch, a_package_of_the_gpu_check as carried; print(torch.__version__, carried.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split()[0] == torch.__version__
    assert said.split()[1].startswith(str(folder))


def _write_wheel(folder: Path, name: str) -> None:
    import zipfile

    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
