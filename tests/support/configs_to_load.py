"""Shared by the tests of configs: a config file, and the line of a refused config."""

from pathlib import Path

import pytest

from areal_rloo.config import load_config
from areal_rloo.errors import ConfigError


def write(folder: Path, text: str) -> str:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides)
    message = str(caught.value)
    assert "\n" not in message, "a mistake is told in one line"
    return message
