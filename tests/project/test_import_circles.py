"""No two modules of the package import each other, directly or through others."""

from collections.abc import Mapping

import grimp
import pytest


def circles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components with at least two modules (Tarjan, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []
    for root in imports:
        path = [] if root in index else [(root, iter(sorted(imports[root])))]
        while path:
            module, rest = path[-1]
            if module not in index:
                index[module] = low[module] = len(index)
                stack.append(module)
            for imported in rest:
                if imported not in index:
                    path.append((imported, iter(sorted(imports[imported]))))
                    break
                if imported in stack:
                    low[module] = min(low[module], index[imported])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[module])
                if low[module] == index[module]:
                    start = stack.index(module)
                    found.append(set(stack[start:]))
                    del stack[start:]
    return [component for component in found if len(component) > 1]


@pytest.mark.parametrize("type_checking", [True, False], ids=["with imports for types", "at run time"])
def test_the_package_has_no_import_circle(type_checking: bool) -> None:
    graph = grimp.build_graph("areal_rloo", exclude_type_checking_imports=not type_checking, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100, "the graph has the whole package"
    assert circles(imports) == []


def test_import_circles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "f"}, "f": {"g"}, "g": {"e"}}
    assert sorted(map(sorted, circles(imports))) == [["b", "c"], ["e", "f", "g"]]
