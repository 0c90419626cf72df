"""Damage the files of a folder as the bytes of a fuzzer say, and make the folder whole again.

an input    a byte: 1 rewrites the checksums; then up to four damages
a damage    the number of a file, the kind, a place and a length (2 bytes each), and so many bytes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_MOST_DAMAGES = 4
_HEAD_BYTES = 6
_REPLACE, _OVERWRITE, _INSERT, _CUT, _REMOVE, _COPY = range(6)
Files = dict[str, bytes]  # by name below the folder


class Whole:
    """A folder of good files, to be damaged again and again."""

    def __init__(self, folder: Path, *, reseal: Callable[[Files], Files] = dict) -> None:
        """`reseal` takes all files, and gives the files with right checksums."""
        self.folder = folder
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
        self.files: Files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        self._reseal = reseal

    def seeds(self) -> list[bytes]:
        """Give the good files, and for each file the input that replaces the file with the same content."""
        wholes = [bytes([1]) + _damage(n, _REPLACE, content) for n, content in enumerate(self.files.values())]
        bits = [_damage(number, _OVERWRITE, b"\0", 9) for number in range(len(self.files))]
        bits += [_damage(0, _CUT, b"", 9), _damage(0, _REMOVE, b"")]
        return [b"\0", *wholes, *(b"\0" + bit for bit in bits), *(b"\1" + bit for bit in bits)]

    @contextmanager
    def damaged(self, content: bytes) -> Iterator[Path]:
        """Damage the files for the time of a block."""
        files = dict(self.files)
        for number, kind, place, data in _damages(content):
            name = [*self.files][number % len(self.files)]
            _apply(files, name, kind, place, data)
        if content[:1] != b"\0":
            files = self._reseal(files)
        touched = {name for name in self.files | files if self.files.get(name) != files.get(name)}
        try:
            self._write(files, touched)
            yield self.folder
        finally:
            self._write(self.files, touched)

    def _write(self, files: Mapping[str, bytes], names: set[str]) -> None:
        for name in names:
            path = self.folder / name
            if name in files:
                path.write_bytes(files[name])
            else:
                path.unlink(missing_ok=True)


def _damage(number: int, kind: int, data: bytes, place: int = 0) -> bytes:
    return bytes([number, kind]) + place.to_bytes(2, "little") + len(data).to_bytes(2, "little") + data


def _damages(content: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    at = 1
    for _ in range(_MOST_DAMAGES):
        head = content[at : at + _HEAD_BYTES]
        if len(head) < _HEAD_BYTES:
            return
        place, length = int.from_bytes(head[2:4], "little"), int.from_bytes(head[4:6], "little")
        at += _HEAD_BYTES
        yield head[0], head[1], place, content[at : at + length]
        at += length


def _apply(files: Files, name: str, kind: int, place: int, data: bytes) -> None:
    before = files.get(name, b"")
    place %= len(before) + 1
    match kind % 6:
        case 0:
            files[name] = data
        case 1:
            files[name] = before[:place] + data + before[place + len(data) :]
        case 2:
            files[name] = before[:place] + data + before[place:]
        case 3:
            files[name] = before[:place]
        case 4:
            files.pop(name, None)
        case 5:
            files[name] = files.get([*files][place % len(files)], b"") if files else b""
