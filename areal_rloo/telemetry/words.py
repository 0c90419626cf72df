"""Words from outside as labels of counts: a peer may send other words without end, and every count of words is kept."""

from __future__ import annotations

from collections.abc import Iterable

OTHER = "other"


class Words:
    """The first different words, up to a limit. All further words are the same: `other`."""

    def __init__(self, most: int, known: Iterable[str] = ()) -> None:
        """`known`: words that count towards the limit, but are never `other`."""
        self._most = most
        self._known = set(known)

    def label(self, word: str) -> str:
        """Return the label under which to count this word."""
        if word not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(word)
        return word
