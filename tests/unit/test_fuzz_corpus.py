"""The boundaries refuse or take all bytes that a fuzzer found interesting, without any other exception."""

import pytest
from fuzz.targets import NAMES, corpus, target
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("name", NAMES)
def test_the_kept_corpus_breaks_no_boundary(name: str) -> None:
    inputs = corpus(name)
    assert len(inputs) > len(target(name).seeds())
    for content in inputs:
        target(name).try_bytes(content)  # an AssertionError is a defect


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_seeds_with_changed_bytes_break_no_boundary(name: str, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(target(name).seeds())))
    for _ in range(data.draw(st.integers(1, 4))):
        at, length = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 4))
        content[at : at + length] = data.draw(st.binary(max_size=8))
    target(name).try_bytes(bytes(content))
    assert len(content) < 2**20
