"""Check the layers, and that the base modules import nothing heavy."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "areal_rloo"
HEAVY = ("torch", "numpy", "transformers", "zmq", "rich", "prometheus_client")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("module", ["errors", "trajectory", "config"])
def test_config_trajectory_and_errors_import_nothing_heavy(module: str) -> None:
    code = f"import sys, areal_rloo.{module}; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert python(code).strip() == "[]"


def test_a_config_is_loaded_and_checked_without_anything_heavy() -> None:
    code = f"""
import sys
from areal_rloo.config import dump_config, load_config
dump_config(load_config("quickstart.yaml", ["run.seed=1"]))
print(sorted(set({HEAVY!r}) & set(sys.modules)))"""
    assert python(code).strip() == "[]"


def test_the_intake_imports_no_torch_at_run_time() -> None:
    assert python("import sys, areal_rloo.intake.service; print('torch' in sys.modules)").strip() == "False"


def test_the_launcher_starts_without_torch() -> None:
    """The launcher reports a mistake at once, before seconds of imports."""
    code = "import sys, areal_rloo.launcher.local; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert python(code).split() == ["False", "False"]


def test_a_launcher_refuses_a_machine_without_gpu_and_server_before_torch() -> None:
    code = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from areal_rloo.errors import UserError
from areal_rloo.launcher import local
try:
    local.main(["--config", "gsm8k_rloo.yaml", "rollout.sglang.python=/nowhere/python"])
except UserError as error:
    print("no GPU" in str(error), "found none at /nowhere/python" in str(error), "torch" in sys.modules)"""
    assert python(code).split() == ["True", "True", "False"]


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("zmq", ["wire"]),
        ("torch.distributed", ["weights/collective.py", "learner/parallel"]),
        ("ray", ["launcher/ray"]),
        ("sglang", []),
    ],
)
def test_a_library_is_imported_only_in_its_own_modules(library: str, homes: list[str]) -> None:
    package = ROOT / "areal_rloo"
    strangers = []
    for path in package.rglob("*.py"):
        inside = str(path.relative_to(package))
        if any(inside == home or inside.startswith(f"{home}/") for home in homes):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if any(name == library or name.startswith(f"{library}.") for name in names):
                strangers.append(f"{inside}:{node.lineno}")
    assert not strangers


def test_only_the_module_for_it_decodes_bytes_from_outside() -> None:
    """Elsewhere a flipped bit could raise UnicodeDecodeError or RecursionError, which no handler expects."""
    homes = {"decoding.py", "learner/team.py"}  # the ranks of a learner send each other tensors
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {name for name, text in sources.items() if re.search(r"msgspec\.(json|msgpack)\.(decode|Decoder)\b", text)}
    assert found == homes
