"""Count the words that make English hard to read: `python tests/support/english.py PATH...`.

In: Python files, read for comments and docstrings, and Markdown files, read for prose outside code and tables.
Out: occurrences of each word of `LIMITS` per 1,000 words.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

# The most occurrences per 1,000 words. The limits are the upper ends of the ranges of nanochat, prime-rl and httpx.
LIMITS = {"what": 0.5, "it": 4.9, "its": 2.7, "one": 3.5, "that": 7.9, "nobody": 0.0, "whoever": 0.0}

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def words_of(path: Path) -> list[str]:
    """Return the words of one file, in lower case."""
    text = path.read_text(encoding="utf-8")
    prose = _markdown_prose(text) if path.suffix == ".md" else "\n".join([*_comments(text), *_docstrings(text)])
    return re.findall(r"[a-z']+", prose.lower())


def rates(words: list[str]) -> dict[str, float]:
    """Return the occurrences of each word of `LIMITS` per 1,000 words."""
    return {word: 1000 * words.count(word) / max(1, len(words)) for word in LIMITS}


def above_limits(paths: Iterable[Path]) -> dict[str, str]:
    """Return the words above their limit in all files together, each with its rate and the files that use it most."""
    words = {path: words_of(path) for path in paths}
    measured = rates([word for of_file in words.values() for word in of_file])
    return {
        word: f"{rate:.1f} per 1,000 words, at most {LIMITS[word]}; most in {_most(word, words)}"
        for word, rate in measured.items()
        if rate > LIMITS[word]
    }


def _most(word: str, words: dict[Path, list[str]]) -> str:
    counts = {str(path): of_file.count(word) for path, of_file in words.items()}
    ordered = sorted(counts, key=counts.__getitem__, reverse=True)
    return ", ".join(f"{path} ({counts[path]})" for path in ordered[:10] if counts[path])


def _comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#")


def _docstrings(source: str) -> Iterator[str]:
    """Yield docstrings, and the strings below attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield text


def _markdown_prose(text: str) -> str:
    """Drop code blocks, tables, inline code and the targets of links."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def _files(arguments: Iterable[str]) -> Iterator[Path]:
    for argument in map(Path, arguments):
        yield from sorted(argument.rglob("*.py")) if argument.is_dir() else [argument]


if __name__ == "__main__":
    found = {path: words_of(path) for path in _files(sys.argv[1:])}
    for path, of_file in found.items():
        counts = {word: of_file.count(word) for word in LIMITS if word in of_file}
        sys.stdout.write(f"{path}: {len(of_file)} words {counts}\n")
    together = [word for of_file in found.values() for word in of_file]
    per_thousand = {word: round(rate, 1) for word, rate in rates(together).items()}
    sys.stdout.write(f"{len(together)} words, per 1,000: {per_thousand}\n")
