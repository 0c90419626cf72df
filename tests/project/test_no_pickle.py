"""No code of the package can unpickle, and no model is loaded with its own code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "areal_rloo"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = ("pickle", "shelve", "dill", "cloudpickle", "joblib", "torch.distributed.checkpoint", "marshal")
CALLS = ("torch.load", "torch.save", "np.load", "np.save", "pd.read_pickle", "yaml.unsafe_load", "yaml.full_load")
# Orders to a child of the same program, in a folder of the owner, read at once.
MAY_MARSHAL = ("tasks/tools/sandbox.py", "tasks/tools/sandbox_child.py")


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _calls(tree: ast.AST) -> Iterator[tuple[str, dict[str | None, str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_has_no_way_to_unpickle(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {name for name in _imported(tree) if any(f"{name}.".startswith(f"{module}.") for module in MODULES)}
    if str(path.relative_to(PACKAGE)) in MAY_MARSHAL:
        found -= {"marshal"}
    assert not found
    assert not {name for name, _ in _calls(tree)} & set(CALLS)


def test_every_model_is_loaded_without_pickle_and_without_code() -> None:
    num_models = 0
    for path in FILES:
        for name, words in _calls(ast.parse(path.read_text(encoding="utf-8"))):
            if not name.endswith(".from_pretrained") or name.startswith("GenerationConfig."):
                continue
            safe = words.get(None) == "_SAFE"  # `**_SAFE` of models/loading.py
            assert safe or words.get("trust_remote_code") == "False", f"{path}: {name}"
            if name.startswith("AutoModel"):
                num_models += 1
                assert safe or words.get("use_safetensors") == "True", f"{path}: {name}"
    assert num_models == 2
