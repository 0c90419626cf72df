"""Prompts that are too long: refused with their name, left out and counted, or truncated on a side."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.config import DataConfig
from areal_rloo.errors import DataError
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.models.files import load_tokenizer
from areal_rloo.tasks import Item, Source
from areal_rloo.tasks.chat import ChatFormat, Tokenizer


def _tokenized(folder: Path, prompt: str, **data: object) -> tuple[int, ...] | None:
    config = DataConfig(**data)  # type: ignore[arg-type]
    return Tokenizer(ChatFormat(load_tokenizer(str(folder)), config), config)(Item(prompt, source="mine"), 7)


def test_a_prompt_that_is_too_long_is_refused_with_the_remedies(
    tiny_folders: dict[str, Path],
) -> None:
    with pytest.raises(DataError) as caught:
        _tokenized(tiny_folders["qwen2"], "how many apples are there", max_prompt_tokens=5)
    expected = "data.max_prompt_tokens: expected at most 5, got 25 tokens for item 7 of the source 'mine', with the "
    assert str(caught.value).startswith(f"{expected}prompt 'how many apples")
    assert "set data.overlong_prompts to filter or truncate_left" in str(caught.value)


def test_a_prompt_that_is_too_long_is_left_out(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["qwen2"]
    whole = _tokenized(folder, "1+2+3=?")
    assert whole is not None
    assert _tokenized(folder, "1+2+3=?", max_prompt_tokens=5, overlong_prompts="filter") is None
    assert _tokenized(folder, "1+2+3=?", max_prompt_tokens=7, overlong_prompts="filter") == whole


@pytest.mark.parametrize(
    ("side", "most", "expected"),
    [
        ("left", 5, "2+3=?"),
        ("right", 5, "1+2+3"),
        ("middle", 5, "1+3=?"),
        ("middle", 4, "1+=?"),
        ("middle", 1, "?"),
        *((side, 7, "1+2+3=?") for side in ("left", "right", "middle")),
    ],
)
def test_a_prompt_loses_tokens_on_the_side_that_is_named(
    side: str, most: int, expected: str, tiny_folders: dict[str, Path]
) -> None:
    folder = tiny_folders["qwen2"]
    shorter = _tokenized(folder, "1+2+3=?", max_prompt_tokens=most, overlong_prompts=f"truncate_{side}")
    assert shorter == _tokenized(folder, expected)


def test_an_item_has_its_number_in_its_own_source() -> None:
    seen: list[tuple[str, int]] = []
    sources = [Source("a", [Item("a1"), Item("a2")]), Source("b", [Item("b1"), Item("b2"), Item("b3")])]

    def tokenize(item: Item, number: int) -> tuple[int, ...]:
        seen.append((item.text, number))
        return (1,)

    stream = PromptStream(sources, tokenize, seed=0, num_epochs=1)
    while stream.take() is not None:
        pass
    assert sorted(seen) == [("a1", 1), ("a2", 2), ("b1", 1), ("b2", 2), ("b3", 3)]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 30), st.integers(0, 9), st.integers(1, 3))
def test_every_prompt_that_fits_is_handed_out_once_per_epoch(
    fits: list[bool], stop_after: int, seed: int, num_epochs: int
) -> None:
    items = [Item(str(index), "") for index in range(len(fits))]

    def stream() -> PromptStream:
        return PromptStream(
            [Source("all", items)],
            lambda item, _: (int(item.text),) if fits[int(item.text)] else None,
            seed=seed,
            num_epochs=num_epochs,
        )

    first, taken = stream(), []
    if not any(fits):
        with pytest.raises(DataError, match="none of the"):
            while first.take() is not None:
                pass
        return
    for _ in range(stop_after):
        prompt = first.take()
        if prompt is None:
            break
        taken.append((prompt.epoch, prompt.item_index))
    second = stream()
    second.restore(first.state())
    while (prompt := second.take()) is not None:
        taken.append((prompt.epoch, prompt.item_index))
    assert sorted(taken) == [(epoch, index) for epoch in range(num_epochs) for index, fit in enumerate(fits) if fit]
    assert second.num_filtered == num_epochs * fits.count(False)
    assert second.epoch == num_epochs


def test_the_longest_prompt_is_met_at_the_start(tiny_folders: dict[str, Path]) -> None:
    """Not at step 400, when a stream comes to it."""
    config = DataConfig(max_prompt_tokens=9)
    tokenize = Tokenizer(ChatFormat(load_tokenizer(str(tiny_folders["qwen2"])), config), config)
    items = [Item("1+1=?", source="mine")] * 1000
    fitting, long = Source("mine", items), Source("mine", [*items, Item("1+2+3+4+5+6=?", source="mine"), *items])
    assert tokenize.checked([fitting]) == [fitting]
    with pytest.raises(DataError, match="expected at most 9, got 13 tokens for item 1001 of the source 'mine'"):
        tokenize.checked([fitting, long])


@pytest.mark.parametrize("rule", ["filter", "truncate_left"])
def test_with_another_rule_nothing_is_met_at_the_start(rule: str, tiny_folders: dict[str, Path]) -> None:
    config = DataConfig(max_prompt_tokens=3, overlong_prompts=rule)  # type: ignore[arg-type]
    tokenize = Tokenizer(ChatFormat(load_tokenizer(str(tiny_folders["qwen2"])), config), config)
    tokenize.checked([Source("mine", [Item("1+1=?")])])
    assert tokenize.num_truncated == 0
