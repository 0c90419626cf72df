"""Mixtures of sources: shares, epochs, restarts, and refused mixtures."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_rloo.config import load_config
from areal_rloo.errors import ConfigError, DataError
from areal_rloo.intake.prompts import PromptStream, PromptStreamState
from areal_rloo.tasks import Item, Source


def _stream(sizes: list[int], weights: list[float | None], *, num_epochs: int | None, seed: int = 3) -> PromptStream:
    sources = [
        Source(f"s{number}", [Item(f"{number}/{index}") for index in range(size)], weight)
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return PromptStream(sources, lambda item, _: (1,), seed=seed, num_epochs=num_epochs)


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(SIZES, st.integers(0, 60), st.integers(1, 3))
def test_a_mixture_hands_out_every_prompt_once_per_epoch(sizes: list[int], stop_after: int, num_epochs: int) -> None:
    weights: list[float | None] = [None] * len(sizes)
    first = _stream(sizes, weights, num_epochs=num_epochs)
    taken = [first.take() for _ in range(min(stop_after, num_epochs * sum(sizes)))]
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(first.state()), type=PromptStreamState)
    second = _stream(sizes, weights, num_epochs=num_epochs)
    second.restore(state)
    while (prompt := second.take()) is not None:
        taken.append(prompt)
    seen = Counter((p.epoch, p.item_index, p.item.text) for p in taken if p is not None)
    texts = [f"{number}/{index}" for number, size in enumerate(sizes) for index in range(size)]
    assert seen == Counter((epoch, i, text) for epoch in range(num_epochs) for i, text in enumerate(texts))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10)), min_size=1, max_size=4))
def test_a_weighted_mixture_keeps_its_shares_at_every_moment(
    sources: list[tuple[int, float]],
) -> None:
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    stream = _stream(sizes, list(weights), num_epochs=None)
    by_source, by_item = Counter[int](), Counter[str]()
    for num in range(1, 150):
        prompt = stream.take()
        assert prompt is not None
        number = int(prompt.item.text.partition("/")[0])
        by_source[number] += 1
        by_item[prompt.item.text] += 1
        for index, weight in enumerate(weights):
            assert by_source[index] < num * weight / sum(weights) + 1 + 1e-9
    for number, size in enumerate(sizes):
        of_source = [by_item[f"{number}/{index}"] for index in range(size)]
        assert max(of_source) - min(of_source) <= 1


def test_epochs_of_a_weighted_mixture_end_with_the_last_source() -> None:
    stream = _stream([2, 6], [3.0, 1.0], num_epochs=1)
    taken = []
    while (prompt := stream.take()) is not None:
        taken.append(prompt.item.text)
    counts = Counter(taken)
    assert {counts[f"1/{index}"] for index in range(6)} == {1}
    assert all(8 <= counts[f"0/{index}"] <= 9 for index in range(2))


def test_sources_are_shuffled_apart_and_mixed_evenly() -> None:
    stream = _stream([40, 40], [None, None], num_epochs=1)
    order = [prompt.item.text for _ in range(80) if (prompt := stream.take()) is not None]
    first, second = ([text.partition("/")[2] for text in order if text.startswith(f"{n}/")] for n in (0, 1))
    assert first != second
    assert first != sorted(first, key=int)
    assert [text[0] for text in order[:10]].count("0") == 5


def test_a_rare_source_is_tried_before_all_prompts_are_too_long() -> None:
    sources = [Source("common", [Item("0")] * 2, 1000.0), Source("rare", [Item("1")] * 2, 1.0)]
    stream = PromptStream(sources, lambda item, _: (1,) if item.text == "1" else None, seed=0, num_epochs=None)
    assert [prompt.item.text for _ in range(3) if (prompt := stream.take()) is not None] == ["1"] * 3


def test_a_prompt_too_long_for_a_resumed_run_is_reported() -> None:
    sources = [Source("all", [Item("a"), Item("b")])]
    stream = PromptStream(sources, lambda item, _: None, seed=0, num_epochs=None)
    with pytest.raises(DataError, match="a prompt in the checkpoint is longer; resume with the value the run had"):
        stream.prompt(0, 1)


def test_a_checkpoint_of_other_data_is_refused() -> None:
    same_size = [Source("s0", [Item(text) for text in "abc"]), Source("s1", [Item(text) for text in "abcd"])]
    with pytest.raises(DataError, match="resume with the config and the data it was made with"):
        PromptStream(same_size, lambda item, _: (1,), seed=0, num_epochs=1).restore(
            _stream([3, 4], [None, None], num_epochs=1).state()
        )
    state = _stream([3, 4], [None, None], num_epochs=1).state()
    with pytest.raises(DataError, match=r"the checkpoint was made with s0 \(3 items, \w+\), s1 \(4 items"):
        _stream([3], [None], num_epochs=1).restore(state)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("[]", "data.train: expected at least one source, got an empty list"),
        ("[{weight: 1}, {name: b}]", "data.train: expected a weight for every source or for none, got [1.0, None]"),
        ("[{}, {}]", "data.train.1.name: two sources are called 'arithmetic'; give one of them another name"),
        ("[{}, {tsk: gsm8k}]", "unknown key 'data.train.1.tsk'; did you mean 'data.train.1.task'?"),
        ("[{}, {name: b, weight: -1}]", "data.train.1.weight: expected float > 0.0; the value is -1"),
        ("{path: a, hub: b}", "data.train.hub: expected a path or a hub dataset, got both (a, b)"),
        ("{rewards: [{}]}", "data.train.rewards.0: expected exactly one of task, function, url, model, got none"),
        ("{rewards: [{url: x}]}", "data.train.rewards.0.url: expected http://HOST:PORT or https://HOST:PORT, got 'x'"),
        (
            "{rewards: [{task: math, model: m}]}",
            "data.train.rewards.0: expected exactly one of task, function, url, model, got task, model",
        ),
        ("{rewards: [{task: math, device: cpu}]}", "rewards.0.device: nothing reads it without model; leave it out"),
        ("{rewards: [{url: 'http://x', parameters: {a: 1}}]}", "rewards.0.parameters: nothing reads it without task"),
        ("{path: a, hub_split: test}", "data.train.hub_split: nothing reads it with a path (a); leave it out"),
        (
            "{rewards: [{task: math}, {task: math}]}",
            "data.train.rewards.1.name: two rewards are called 'math'; give one of them another name",
        ),
    ],
)
def test_an_impossible_mixture_is_refused_with_its_key(train: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart.yaml", [f"data.train={train}"])
    assert words in str(caught.value)


def test_a_source_of_a_mixture_is_overridden_by_its_number() -> None:
    config = load_config("quickstart.yaml", ["data.train=[{}, {name: b}]", "data.train.1.num_prompts=7"])
    assert [source.num_prompts for source in config.data.train_sources] == [None, 7]
    with pytest.raises(ConfigError, match=r"'data\.train\.2': expected an index from 0 to 1"):
        load_config("quickstart.yaml", ["data.train=[{}, {name: b}]", "data.train.2.num_prompts=7"])
