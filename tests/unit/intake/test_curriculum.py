"""A curriculum of the user: draws by weights, which follow the rewards, and goes on exactly from a checkpoint."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_rloo.config import Config, DataConfig
from areal_rloo.errors import DataError, UserError
from areal_rloo.intake.curriculum import MOST_REWARDS, Curriculum, CurriculumState, load_curriculum
from areal_rloo.intake.prompts import PromptStream, PromptStreamState
from areal_rloo.tasks import Item, Source
from areal_rloo.trajectory import Completion, Group, Trajectory

ITEMS = [Item(str(index)) for index in range(5)]
MINE = """
import random
def hard(items, rewards):
    return [2 - sum(past) / len(past) if past else 1 for past in rewards]
def fixed(items):
    return [float(item.prompt) for item in items]
def short(items): return [1]
def negative(items): return [-1] + [1] * (len(items) - 1)
def nan(items): return [float("nan")] * len(items)
def zero(items): return [0] * len(items)
def text(items): return ["much"] * len(items)
def none(items): pass
def chance(items): return [random.random() for _ in items]
def raises(items, rewards): return [past[0] for past in rewards]
async def later(items): return [1] * len(items)
"""
FAULTS = {
    "short": r"returned \[1\] numbers, expected a weight of at least 0 for each of the 5 items, and one above 0",
    "negative": "returned the weight -1, expected",
    "nan": "returned the weight nan, expected",
    "zero": "returned weights with the sum 0, expected",
    "text": "returned a value of the type list, expected",
    "none": r"returned \[\] numbers, expected",
    "chance": "returned other weights for the same rewards",
    "raises": r"raised IndexError: .* \(.*mine.py:\d+\)$",
    "later": "is async",
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("curriculum") / "mine.py"
    path.write_text(MINE)
    return str(path)


def _stream(path: str, *sources: Source, every: int = 3, seed: int = 1) -> PromptStream:
    sources = sources or (Source("all", ITEMS),)
    curriculum = Curriculum(path, [source.items for source in sources], seed=seed, every=every)
    return PromptStream(sources, lambda *_: (1,), seed=seed, num_epochs=None, curriculum=curriculum)


def _note(stream: PromptStream, item_index: int, *rewards: float) -> None:
    assert stream.curriculum is not None
    completion = Completion(np.array([2]), np.array([-1.0], np.float32), np.array([0]), "stop")
    made = tuple(Trajectory(0, index, np.array([1]), completion, reward) for index, reward in enumerate(rewards))
    stream.curriculum.note(Group(0, 1, made, item_index=item_index))


def _take(stream: PromptStream, num: int) -> list[int]:
    prompts = [stream.take() for _ in range(num)]
    return [prompt.item_index for prompt in prompts if prompt is not None]


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_curriculum_is_refused_before_the_first_prompt(mine: str, name: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.curriculum: .*:{name} .*{FAULTS[name]}"):
        Curriculum(f"{mine}:{name}", [ITEMS], seed=0, every=1)


def test_items_are_drawn_by_their_weights(mine: str) -> None:
    drawn = Counter(_take(_stream(f"{mine}:fixed"), 4000))
    assert drawn[0] == 0
    for index in range(1, 5):
        assert drawn[index] / 4000 == pytest.approx(index / 10, abs=0.03)


def test_each_source_of_a_mixture_has_weights_of_its_own(mine: str) -> None:
    second = [Item("1"), Item("0"), Item("3")]
    stream = _stream(f"{mine}:fixed", Source("a", ITEMS, weight=1), Source("b", second, weight=1))
    drawn = Counter(_take(stream, 2000))
    assert sum(drawn[index] for index in range(5)) == 1000
    assert drawn[6] == 0
    assert drawn[7] / 1000 == pytest.approx(0.75, abs=0.05)


def test_weights_follow_the_rewards_after_a_batch_of_prompts(mine: str) -> None:
    stream, alone = _stream(f"{mine}:hard", every=4), _stream(f"{mine}:hard", every=4)
    first = _take(stream, 2)
    for index in range(4):
        _note(stream, index, 2.0, 2.0)  # weight 0
    assert [*first, *_take(stream, 2)] == _take(alone, 4), "the weights stay for a batch"
    assert _take(stream, 8) == [4] * 8


def test_the_newest_rewards_are_kept(mine: str) -> None:
    stream = _stream(f"{mine}:hard")
    for number in range(MOST_REWARDS + 2):
        _note(stream, 3, number, number + 1)
    state = stream.state().curriculum
    assert state is not None
    assert state.rewards == {3: [number + 0.5 for number in range(2, MOST_REWARDS + 2)]}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 2)), max_size=20), st.integers(0, 20), st.integers(1, 5))
def test_a_resume_draws_the_prompts_of_an_unbroken_run(
    mine: str, noted: list[tuple[int, float]], stop_after: int, every: int
) -> None:
    def go_on(stream: PromptStream, begin: int, end: int) -> list[int]:
        drawn = []
        for number in range(begin, end):
            drawn += _take(stream, 1)
            for item_index, reward in noted[number : number + 1]:
                _note(stream, item_index, reward, reward)
        return drawn

    whole = _stream(f"{mine}:hard", every=every)
    expected = go_on(whole, 0, 30)
    stopped = _stream(f"{mine}:hard", every=every)
    before = go_on(stopped, 0, stop_after)
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(stopped.state()), type=PromptStreamState)
    resumed = _stream(f"{mine}:hard", every=every)
    resumed.restore(saved)
    assert before + go_on(resumed, stop_after, 30) == expected


@pytest.mark.parametrize(
    "damaged",
    [
        CurriculumState({0: b"1234"}, {}),
        CurriculumState({1: np.arange(5.0).tobytes()}, {}),
        CurriculumState({0: np.array([1, 2, 1, 3, 4.0]).tobytes()}, {}),
        CurriculumState({0: np.array([1, 2, 3, 4, np.inf]).tobytes()}, {}),
        CurriculumState({0: np.zeros(5).tobytes()}, {}),
        CurriculumState({}, {5: [1.0]}),
    ],
)
def test_a_state_of_other_items_is_refused(mine: str, damaged: CurriculumState) -> None:
    stream = _stream(f"{mine}:hard")
    with pytest.raises(DataError, match=r"^data\.curriculum: .*in the checkpoint"):
        stream.restore(msgspec.structs.replace(stream.state(), curriculum=damaged))


def test_a_curriculum_begins_and_ends_with_a_resume(mine: str) -> None:
    without = PromptStream([Source("all", ITEMS)], lambda *_: (1,), seed=1, num_epochs=None)
    expected = _take(without, 10)
    state, stream = without.state(), _stream(f"{mine}:fixed")
    stream.restore(state)
    assert 0 not in _take(stream, 50)
    back = PromptStream([Source("all", ITEMS)], lambda *_: (1,), seed=1, num_epochs=None)
    back.restore(msgspec.structs.replace(stream.state(), taken=[0]))
    assert _take(back, 10) == expected


def test_the_config_names_the_curriculum(mine: str) -> None:
    assert load_curriculum(Config(), [ITEMS]) is None
    made = load_curriculum(Config(data=DataConfig(curriculum=f"{mine}:fixed")), [ITEMS])
    assert made is not None
    assert made.draw(0, 0) in range(1, 5)
