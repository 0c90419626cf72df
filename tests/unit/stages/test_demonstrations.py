"""Demonstrations as token ids: which tokens are learned, lengths, and a line for each mistake."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.episodes import CHAT_ML
from transformers import PreTrainedTokenizerFast

from areal_rloo.config import Config, load_config
from areal_rloo.errors import DataError
from areal_rloo.learner.advantages import policy_tokens
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.stages.examples import Encoder, Examples, load_examples
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Trajectory

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "4!"},
]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = CHAT_ML
    return tokenizer


def loaded(
    folder: Path, *rows: dict[str, Any], tokenizer: Any = None, overrides: tuple[str, ...] = ()
) -> tuple[Config, Examples]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"data.train={{task: demonstrations, path: {path}}}"
    config = load_config("quickstart.yaml", [source, "data.eval=null", "data.max_prompt_tokens=160", *overrides])
    chat = ChatFormat(tokenizer or make_tiny_tokenizer(), config.data)
    (examples,), _ = load_examples(config, Encoder(config, chat, vocab_size=260))
    return config, examples


def learned_text(example: Trajectory, tokenizer: Any) -> list[str]:
    """Decode each span of learned tokens."""
    tokens, mask = example.completion.tokens, policy_tokens(example).numpy()
    parts = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(mask.astype(int))) + 1)
    return [tokenizer.decode(tokens[part]) for part in parts if mask[part[0]]]


def test_a_completion_is_learned_with_its_end_and_the_prompt_is_not(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    _, examples = loaded(tmp_path, {"prompt": "1+1=?\n", "completion": "#### 2"})
    (example,) = examples.trajectories
    assert tokenizer.decode(example.prompt_tokens) == "1+1=?\n"
    assert learned_text(example, tokenizer) == ["#### 2<eos>"]
    assert example.reward == 1
    assert examples.words() == ("demonstrations: 1 examples, 7 tokens to learn, the longest example 13 tokens")


def test_only_turns_of_the_assistant_are_learned(tmp_path: Path) -> None:
    """All tokens together are those of the template for the whole chat."""
    tokenizer = chat_tokenizer()
    _, examples = loaded(tmp_path, {"messages": CHAT}, tokenizer=tokenizer)
    (example,) = examples.trajectories
    assert learned_text(example, tokenizer) == ["2<eos>", "4!<eos>"]
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False).removesuffix("\n")
    tokens = [*example.prompt_tokens.tolist(), *example.completion.tokens.tolist()]
    assert tokens == tokenizer.encode(whole, add_special_tokens=False)


def test_of_prompt_and_completion_earlier_answers_are_not_learned(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    _, examples = loaded(tmp_path, {"prompt": CHAT[:4], "completion": CHAT[4:]}, tokenizer=tokenizer)
    assert learned_text(examples.trajectories[0], tokenizer) == ["4!<eos>"]


def test_a_built_in_task_has_demonstrations(tmp_path: Path) -> None:
    config = load_config("quickstart.yaml", ["data.train.num_prompts=3", "data.eval.num_prompts=2"])
    tokenizer = make_tiny_tokenizer()
    (train,), (held_out,) = load_examples(config, Encoder(config, ChatFormat(tokenizer, config.data), vocab_size=260))
    assert (len(train.trajectories), len(held_out.trajectories), held_out.label) == (3, 2, "arithmetic")
    text = tokenizer.decode(train.trajectories[0].completion.tokens)
    assert text.endswith("<eos>")
    assert "\n#### " in text


LONG = ({"prompt": "a", "completion": "bcdefgh"}, {"prompt": "a", "completion": "b"})
SHORT = ("rollout.sampling.max_new_tokens=4",)


def test_a_completion_too_long_is_refused_left_out_or_cut(tmp_path: Path) -> None:
    expected = r"max_new_tokens: expected at most 4, got 8 tokens for data.train: item 1 \('a'\); raise it, or set data"
    with pytest.raises(DataError, match=expected):
        loaded(tmp_path, *LONG, overrides=SHORT)
    _, examples = loaded(tmp_path, *LONG, overrides=(*SHORT, "data.overlong_prompts=filter"))
    assert examples.words().endswith("; left out: 1")
    assert [len(example.completion.tokens) for example in examples.trajectories] == [2]
    _, examples = loaded(tmp_path, *LONG, overrides=(*SHORT, "data.overlong_prompts=truncate_left"))
    cut, whole = (example.completion for example in examples.trajectories)
    assert make_tiny_tokenizer().decode(cut.tokens) == "bcde"
    assert (cut.finish_reason, whole.finish_reason) == ("length", "stop")
    with pytest.raises(DataError, match="none of 1 examples is within"):
        loaded(tmp_path, LONG[0], overrides=(*SHORT, "data.overlong_prompts=filter"))


@pytest.mark.parametrize("most", [1, 5, 6, 20, 40])
def test_a_cut_chat_learns_the_first_of_the_learned_tokens(most: int, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    (whole,) = loaded(tmp_path, {"messages": CHAT}, tokenizer=tokenizer)[1].trajectories
    overrides = (f"rollout.sampling.max_new_tokens={most}", "data.overlong_prompts=truncate_left")
    (cut,) = loaded(tmp_path, {"messages": CHAT}, tokenizer=tokenizer, overrides=overrides)[1].trajectories
    assert policy_tokens(cut).tolist() == policy_tokens(whole).tolist()[:most]
    assert cut.completion.tokens.tolist() == whole.completion.tokens.tolist()[:most]


USER, ASSISTANT = CHAT[1], CHAT[2]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a"}, "expected the fields 'prompt' and 'completion', or 'messages', got prompt"),
        ({"completion": "a"}, "expected a text or messages in the field 'prompt', got the fields completion"),
        ({"prompt": "a", "completion": ""}, "expected a text of the assistant in the field 'completion', got an empty"),
        ({"prompt": "a", "completion": 3}, "expected a text of the assistant in the field 'completion'"),
        ({"messages": [USER]}, "expected messages of the assistant in the field 'messages'"),
        ({"messages": [USER, ASSISTANT, USER]}, "got assistant, user"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "each before another role; got assistant, assistant"),
        ({"messages": [ASSISTANT]}, "expected a message before the assistant's"),
        ({"messages": "hello"}, "expected messages of role and content in the field 'messages'"),
        ({"messages": [{"role": "bot", "content": ""}]}, "expected messages of role and content"),
    ],
)
def test_a_wrong_row_is_a_line_with_file_and_field(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{expected}"):
        loaded(tmp_path, {"prompt": "a", "completion": "b"}, row)


def test_a_task_without_an_answer_is_a_line_with_the_item(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from areal_rloo.tasks import Item, Task\n"
        "class Mine(Task):\n"
        "    def __init__(self, source, seed): pass\n"
        "    def items(self, split): return [Item('a', 'b'), Item('c')]\n"
        "    def reward(self, completion, item): return 0.0\n"
    )
    config = load_config("quickstart.yaml", [f"data.train={{task: '{path}:Mine'}}", "data.eval=null"])
    encoder = Encoder(config, ChatFormat(make_tiny_tokenizer(), config.data), vocab_size=260)
    with pytest.raises(DataError, match=r"data.train: item 2 \('c'\): expected a text to learn"):
        load_examples(config, encoder)
    path.write_text(path.read_text() + "    def turns(self, item): return 1 / 0\n")
    with pytest.raises(DataError, match=r"item 1 .* no demonstration can be made: ZeroDivisionError"):
        load_examples(config, encoder)


def sample(text: str, rewarded: float | None, **changes: Any) -> dict[str, Any]:
    tokenizer = make_tiny_tokenizer()
    ids = tokenizer.encode(text)
    made = {"prompt": "a", "prompt_token_ids": tokenizer.encode("a"), "completion": text, "token_ids": ids}
    return {**made, "logprobs": [-0.5] * len(ids), "spans": [], "reward": rewarded, **changes}


def test_samples_of_generate_are_learned_by_their_token_ids(tmp_path: Path) -> None:
    """`least_reward` leaves out the others, and failed samples are left out in any case."""
    rows = [sample("right", 1.0), sample("wrong", 0.0), sample("", None, token_ids=[], logprobs=[], failure="gone")]
    _, examples = loaded(tmp_path, *rows)
    assert len(examples.trajectories) == 2
    _, examples = loaded(tmp_path, *rows, overrides=("data.train.parameters={least_reward: 1.0}",))
    (example,) = examples.trajectories
    assert example.completion.tokens.tolist() == rows[0]["token_ids"]
    assert example.completion.behaviour_logprobs.tolist() == [-0.5] * 5
    with pytest.raises(DataError, match="no row has a reward of at least 2"):
        loaded(tmp_path, *rows, overrides=("data.train.parameters={least_reward: 2.0}",))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"completion": "other"},
            "the tokenizer of model.path decodes token_ids to 'right', expected the completion 'other'",
        ),
        (
            {"token_ids": [5, 999], "logprobs": [-1.0, -1.0]},
            "expected tokens below 260, the vocabulary of model.path, got 999",
        ),
        ({"logprobs": [-1.0]}, "one for each of token_ids in the field 'logprobs', got 1"),
        ({"spans": [3]}, "the number of token_ids in the field 'spans', got 3"),
        ({"token_ids": [-1]}, r"expected a row of areal-rloo generate: .*token_ids\[0\]"),
        ({"reward": "high"}, "expected a number in the field 'reward', got str"),
    ],
)
def test_a_wrong_sample_is_a_line(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=expected):
        loaded(tmp_path, sample("right", 1.0, **changes))
