"""A tiny random model, and a real engine on the model that records its requests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chat_endpoint import Recorder, embedded


@pytest.fixture(scope="session")
def folder(tiny_folders: dict[str, Path]) -> Path:
    return tiny_folders["qwen2"]


@pytest.fixture
def engine(folder: Path) -> Iterator[Recorder]:
    made = embedded(folder)
    yield made
    made.close()
