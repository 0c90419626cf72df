"""The boundaries refuse or take all bytes that a fuzzer found interesting, without any other exception."""

import pytest
from fuzz.targets import TARGETS, corpus
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("name", TARGETS)
def test_the_kept_corpus_breaks_no_boundary(name: str) -> None:
    inputs = corpus(name)
    assert len(inputs) > len(TARGETS[name].seeds())
    for content in inputs:
        TARGETS[name].try_bytes(content)  # an AssertionError is a defect


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
def test_seeds_with_changed_bytes_break_no_boundary(name: str, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(TARGETS[name].seeds())))
    for _ in range(data.draw(st.integers(1, 4))):
        at, length = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 4))
        content[at : at + length] = data.draw(st.binary(max_size=8))
    TARGETS[name].try_bytes(bytes(content))
    assert len(content) < 2**20
