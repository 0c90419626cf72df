"""Prompts that are too long: refused with their name, left out and counted, or cut to their end."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.config import DataConfig
from areal_rloo.errors import DataError
from areal_rloo.intake.prompts import PromptStream, Tokenizer, check_rows
from areal_rloo.models.files import load_tokenizer
from areal_rloo.tasks import Item, Source
from areal_rloo.tasks.chat import ChatFormat


def _tokenized(folder: Path, prompt: str, **data: object) -> tuple[int, ...] | None:
    config = DataConfig(**data)  # type: ignore[arg-type]
    return Tokenizer(ChatFormat(load_tokenizer(str(folder)), config), config)(Item(prompt))


def test_a_prompt_that_is_too_long_is_refused_with_the_remedies(
    tiny_folders: dict[str, Path],
) -> None:
    with pytest.raises(DataError) as caught:
        _tokenized(tiny_folders["qwen2"], "how many apples are there", max_prompt_tokens=5)
    assert "data.max_prompt_tokens: expected at most 5, got 25 tokens for the prompt 'how many apples" in str(
        caught.value
    )
    assert "set data.overlong_prompts to filter or truncate" in str(caught.value)


def test_a_prompt_that_is_too_long_is_filtered_or_truncated(
    tiny_folders: dict[str, Path],
) -> None:
    folder = tiny_folders["qwen2"]
    whole = _tokenized(folder, "1+2+3=?")
    assert whole is not None
    assert _tokenized(folder, "1+2+3=?", max_prompt_tokens=5, overlong_prompts="filter") is None
    assert _tokenized(folder, "1+2+3=?", max_prompt_tokens=5, overlong_prompts="truncate") == whole[-5:]
    assert _tokenized(folder, "1+2+3=?", max_prompt_tokens=7, overlong_prompts="filter") == whole


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 30), st.integers(0, 9), st.integers(1, 3))
def test_every_prompt_that_fits_is_handed_out_once_per_epoch(
    fits: list[bool], stop_after: int, seed: int, num_epochs: int
) -> None:
    items = [Item(str(index), "") for index in range(len(fits))]

    def stream() -> PromptStream:
        return PromptStream(
            [Source("all", items)],
            lambda item: (int(item.text),) if fits[int(item.text)] else None,
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


def test_a_row_that_fits_no_message_is_refused_with_its_number() -> None:
    rows = [Item("?"), Item("?", fields={"tests": "x" * 2**18}), Item("?")]
    check_rows([Source("code", rows)], max_message_bytes=2**21)
    with pytest.raises(
        DataError, match=r"^code: row 2 has 262\d+ bytes, and wire.max_message_bytes=1048576 allows a row"
    ):
        check_rows([Source("code", rows)], max_message_bytes=2**20)


def test_a_row_that_no_message_can_hold_is_refused_with_its_number() -> None:
    with pytest.raises(DataError, match=r"^code: row 1 cannot be sent to a worker: .*surrogates not allowed"):
        check_rows([Source("code", [Item("\ud800")])], max_message_bytes=2**20)
