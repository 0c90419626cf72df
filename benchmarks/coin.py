"""A reward without meaning, for benchmarks whose model is random: half of all texts get 1, so most groups train."""

import zlib


def coin(completion: str) -> float:
    """Return 0 or 1, by the text alone."""
    return float(zlib.crc32(completion.encode()) % 2)
