"""A chat template from a file: read once, kept in the resolved config, and compared on a resume."""

from pathlib import Path

import pytest
from support.episodes import CHAT_ML

from areal_rloo.config import dump_config, load_config
from areal_rloo.config.resume import changes
from areal_rloo.errors import ConfigError


def test_the_resolved_config_has_the_text_of_the_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(f"{{#- ü\t#}}\n{CHAT_ML}\n")
    config = load_config("quickstart.yaml", [f"data.chat_template={path}"])
    assert config.data.chat_template == f"{{#- ü\t#}}\n{CHAT_ML}\n"
    path.unlink()
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "config.yaml")) == config


def test_a_resume_with_another_template_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    configs = []
    for text in (CHAT_ML, CHAT_ML.replace("assistant", "Assistant")):
        path.write_text(text)
        configs.append(load_config("quickstart.yaml", [f"data.chat_template={path}"]))
    (change,) = changes(*configs)
    assert (change.key, change.rule.effect) == ("data.chat_template", "refused")
    place = CHAT_ML.index("assistant") + 1
    assert change.values.endswith(f"... (different from character {place} on)")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: [Errno 2] No such file or directory"),
        (
            b"plain words",
            "expected a Jinja template of at most 50000 visible characters, with {{ or {% in it, got plain w",
        ),
        (b"", "expected a Jinja template of at most 50000 visible"),
        (b"{{ a }}" * 10_000, "expected a Jinja template of at most 50000 visible"),
        (b"{{ a }}\x1b[1m", "expected a Jinja template of at most 50000 visible"),
        (b"{{ \xff }}", "cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_file_without_a_template_gives_one_line(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart.yaml", [f"data.chat_template={path}"])
    assert f"': data.chat_template: {path}: {words}" in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("null", None)])
def test_a_template_of_the_tokenizer_is_chosen_by_a_word(text: str, value: bool | None) -> None:
    assert load_config("quickstart.yaml", [f"data.chat_template={text}"]).data.chat_template is value
