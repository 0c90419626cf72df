"""What is appended to a text file, as it comes."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """Reads on from where a file ends now; the file need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def read(self) -> str:
        """What came since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                fresh = file.read()
        except OSError:  # not there yet, or on a network that fails for a moment
            return ""
        self._position += len(fresh)
        return fresh.decode(errors="replace")
