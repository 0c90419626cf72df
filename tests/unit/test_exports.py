"""The public names of the packages: each is there, on first use, and nothing heavy is imported before."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ["areal_rloo", *(f"areal_rloo.{name}" for name in ("algorithm", "engines", "wire", "weights", "learner"))]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_the_value_of_its_module(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__file__ is not None
    nodes = list(ast.walk(ast.parse(Path(package.__file__).read_text())))
    imports = {a.name: n.module for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
    public = set(package.__all__) - {"__version__"}
    assert len(public) >= 5
    for export in public:
        home = imports[export]
        assert home is not None and home.startswith("areal_rloo.")
        assert getattr(package, export) is getattr(importlib.import_module(home), export)


def test_packages_import_nothing_heavy_by_themselves() -> None:
    heavy = ("torch", "numpy", "zmq", "transformers", "msgspec", "ast", "inspect")
    code = f"import sys, {', '.join(PACKAGES)}; print(sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_an_unknown_name_is_an_attribute_error() -> None:
    package = importlib.import_module("areal_rloo.algorithm")
    with pytest.raises(AttributeError, match=r"module 'areal_rloo\.algorithm' has no attribute 'polisy_loss'"):
        _ = package.polisy_loss
    assert not hasattr(package, "__wrapped__")
