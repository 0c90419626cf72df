"""Deployment assets: the files of launcher/ beside the package, which a wheel has inside it."""

from __future__ import annotations

from pathlib import Path


def read_asset(name: str) -> str:
    """The text of an asset, by its path inside launcher/."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "assets" / name
    return (inside if inside.is_file() else package.parent / "launcher" / name).read_text(encoding="utf-8")
