"""Everything in a folder, to see whether anything was written."""

from pathlib import Path


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the time of change and the content of every file and folder, by relative path."""
    paths = [folder, *folder.rglob("*")]
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in paths
    }
