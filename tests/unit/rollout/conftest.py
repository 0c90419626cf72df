"""A tiny random model, and a real engine on the model that records its requests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chat_endpoint import Recorder, embedded


@pytest.fixture
def engine(folder: Path) -> Iterator[Recorder]:
    made = embedded(folder)
    yield made
    made.close()
