"""Messages as token ids: plain text without a template, and the end of a turn that was cut."""

import subprocess
import sys

import pytest
from support.episodes import CHAT_ML, EOS

from areal_rloo.config import DataConfig
from areal_rloo.errors import DataError
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Item, Message


def test_without_a_template_messages_become_plain_text() -> None:
    config = DataConfig(system_prompt="Add.")
    chat = ChatFormat(make_tiny_tokenizer(), config)
    item = Item((Message("user", "1+1=?\n"), Message("assistant", "#### 2"), Message("user", "1+2=?\n")))
    assert chat.text(chat.prompt(item)) == "Add.\n1+1=?\n#### 2\n\n1+2=?\n"


def test_text_after_a_cut_turn_starts_with_the_missing_end_of_turn() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = CHAT_ML
    chat = ChatFormat(tokenizer, DataConfig())
    after = [chat.between([Message("user", "go on")], last_token=token) for token in (EOS, *tokenizer.encode("<"))]
    whole, cut = (str(tokenizer.decode(list(tokens))) for tokens in after)
    assert whole == "\n<|im_start|>user\ngo on<eos>\n<|im_start|>assistant\n"
    assert cut == "<eos>" + whole


ENDLESS = """
import sys
from pathlib import Path
from areal_rloo.config import DataConfig
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.telemetry.logs import run_to_exit_code

def run():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = sys.argv[1]
    ChatFormat(tokenizer, DataConfig())
    return 0

sys.exit(run_to_exit_code(run))
"""


def test_a_template_without_end_is_refused_before_the_run() -> None:
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ended = subprocess.run([sys.executable, "-c", ENDLESS, template], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "data.chat_template: the model's template did not render three short messages" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_rendering_that_is_too_long_is_refused() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    chat = ChatFormat(tokenizer, DataConfig())
    with pytest.raises(DataError, match="makes 20000000 characters of 1 messages, expected at most 16777216"):
        chat.conversation([Message("user", "x" * 20_000_000)])


def test_a_template_of_the_config_replaces_that_of_the_tokenizer() -> None:
    tokenizer = make_tiny_tokenizer()
    own = "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}"
    for template in (None, CHAT_ML):
        tokenizer.chat_template = template
        chat = ChatFormat(tokenizer, DataConfig(chat_template=own))
        assert chat.uses_template
        assert chat.text(chat.prompt(Item("1+2=?"))) == "(user)1+2=?"
        assert chat.text(chat.conversation([Message("user", "a"), Message("assistant", "b")])) == "(user)a(assistant)b"
        assert chat.text(chat.between([Message("user", "c")], last_token=EOS)) == "(user)c"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}", "the template refuses the roles user, assistant, user: Unexpected end of template"),
        ("{{ raise_exception('no') }}", "the template refuses the roles user, assistant, user: no"),
        ("{{ conversation }}", "expected a template that writes every message, got '' for a short chat"),
        ("{{ messages[0].content }}", "expected a template that writes every message, got '1+1=?' for a short chat"),
    ],
)
def test_a_template_of_the_config_must_write_a_chat(template: str, words: str) -> None:
    with pytest.raises(DataError) as caught:
        ChatFormat(make_tiny_tokenizer(), DataConfig(chat_template=template))
    assert str(caught.value).startswith(f"data.chat_template: {words}")
