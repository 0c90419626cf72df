"""Files of other systems, read as `areal-rloo migrate` reads them."""

from pathlib import Path

import msgspec

from areal_rloo.migrate.reading import Found, read


def found(name: str, folder: Path, text: str, **settings: object) -> Found:
    """Write a file and read it, with more settings."""
    path = folder / name
    path.write_text(text)
    given = read(path)
    return msgspec.structs.replace(given, settings=given.settings | settings)
