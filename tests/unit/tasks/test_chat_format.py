"""Messages as token ids: plain text without a template, and the end of a turn that was cut."""

from support.episodes import CHAT_ML, EOS

from areal_rloo.config import DataConfig
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
