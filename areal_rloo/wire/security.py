"""CURVE keys for TCP: the launcher makes a pair for each end of a run, readable by the owner alone.

The learner admits a single client key and rejects all other peers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from areal_rloo.errors import PreflightError
from areal_rloo.files import open_private


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The key pair of an end, and the public key of the other end."""

    public: bytes
    secret: bytes = field(repr=False)
    peer_public: bytes


def make_keys(folder: Path) -> None:
    """Write the pairs of both ends into a folder of mode 0700."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    for end in ("learner", "worker"):
        public, secret = zmq.curve_keypair()
        for name, key in ((f"{end}.public", public), (f"{end}.secret", secret)):
            with open_private(folder / name, "wb") as file:
                file.write(key)


def load_keys(folder: Path, *, end: str) -> CurveKeys:
    """Load the keys of an end, `learner` or `worker`.

    Raises:
        PreflightError: a key file is missing, or other users can read the secret key.
    """
    other = {"learner": "worker", "worker": "learner"}[end]
    secret = folder / f"{end}.secret"
    try:
        if secret.stat().st_mode & 0o077:
            raise PreflightError(f"{secret}: others can read this secret key; chmod 600 it")
        return CurveKeys(
            (folder / f"{end}.public").read_bytes(), secret.read_bytes(), (folder / f"{other}.public").read_bytes()
        )
    except OSError as error:
        raise PreflightError(f"wire keys: {error}; the launcher makes them in the run folder") from error
