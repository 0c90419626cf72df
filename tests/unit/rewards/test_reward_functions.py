"""A reward function gets the values named by the parameters, and the returned value is read once."""

import functools
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_rloo.errors import ConfigError, RewardError, described, shortened
from areal_rloo.rewards.functions import FunctionReward, is_async
from areal_rloo.rewards.request import RewardRequest, Worth, read_worth
from areal_rloo.trajectory import Item, Message

FUNCTIONS = """
seen = {}

def named(completion, answer, difficulty, missing=3):
    return (completion == answer) + difficulty + missing

def everything(**given):
    assert set(given) == {
        "prompt", "completion", "turns", "prompt_ids", "completion_ids", "finish_reason", "answer", "purpose",
        "source", "item", "difficulty",
    }, sorted(given)
    return given

def some(prompt, turns, *, prompt_ids, completion_ids, finish_reason, purpose, source, item, **rest):
    assert prompt == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    assert (turns, prompt_ids, completion_ids) == (["a", "2"], [1, 2], [3, 4, 5])
    assert (finish_reason, purpose, source) == ("stop", "train", "mine")
    assert item.fields["prompt"] == "the row's"
    assert sorted(rest) == ["answer", "completion", "difficulty"]
    return 1

def positional(completion, answer="none", /, difficulty=0):
    return float(completion == answer) + difficulty

def unfilled(completion, rubric, difficulty):
    return 0.0

def nothing():
    return 0.5

class Judge:
    async def __call__(self, completion):
        return 1.0

async def later(completion):
    return {"reward": len(completion)}

judge = Judge()
strange = max  # its parameters cannot be read
value = 3
"""

REQUEST = RewardRequest(
    purpose="train",
    item=Item(
        (Message("system", "be brief"), Message("user", "1+1")),
        "2",
        source="mine",
        fields={"difficulty": 10, "prompt": "the row's", "answer": "the row's"},
    ),
    completion="2",
    turns=("a", "2"),
    prompt_ids=(1, 2),
    completion_ids=(3, 4, 5),
    finish_reason="stop",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path / "mine.py"


def _score(file: Path, name: str, request: RewardRequest = REQUEST) -> float:
    return FunctionReward("data.train.rewards.0.function", f"{file}:{name}", returns="token").score(request).reward


def test_a_function_gets_the_named_values_standard_names_first(file: Path) -> None:
    assert _score(file, "named") == 1 + 10 + 3
    assert _score(file, "some") == 1
    assert _score(file, "positional") == 1 + 10
    assert _score(file, "nothing") == 0.5


def test_a_function_with_double_star_parameters_gets_all_values(file: Path) -> None:
    with pytest.raises(RewardError, match="under 'reward', got the keys"):  # it was called, and gave what it got
        _score(file, "everything")


def test_the_prompt_of_a_plain_item_is_its_text(file: Path, tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text("def length(prompt): return len(prompt)")
    plain = msgspec.structs.replace(REQUEST, item=Item("1+1=?"))
    assert _score(tmp_path / "length.py", "length", plain) == 5


def test_a_parameter_without_a_value_is_named_with_all_known_names(file: Path) -> None:
    with pytest.raises(RewardError) as caught:
        _score(file, "unfilled")
    assert caught.value.reason == "reward_error"
    assert caught.value.summary.startswith("unfilled has the parameter 'rubric', which nothing fills; rename it")
    assert "of the item's row difficulty" in caught.value.summary


def test_an_item_without_an_answer_passes_no_answer(tmp_path: Path) -> None:
    """`completion.endswith(answer)` would find everything right."""
    (tmp_path / "ends.py").write_text("def ends(completion, answer): return completion.endswith(answer)")
    without = msgspec.structs.replace(REQUEST, item=Item("1+1=?", fields={"prompt": "1+1=?"}))
    with pytest.raises(RewardError, match="ends has the parameter 'answer', which nothing fills"):
        _score(tmp_path / "ends.py", "ends", without)
    empty = msgspec.structs.replace(REQUEST, item=Item("1+1=?", fields={"answer": ""}))
    assert _score(tmp_path / "ends.py", "ends", empty) == 1


def test_an_import_failure_names_the_config_key(file: Path) -> None:
    for name, reason in (
        ("absent", "has no function 'absent'"),
        ("value", r"expected a function, but .*mine\.py:value is a value of the type int"),
        ("Judge", r"expected a function, but .*mine\.py:Judge is a class; name a function, or an instance of a class"),
        ("strange", "parameters of .* cannot be read"),
    ):
        with pytest.raises(ConfigError, match=rf"data\.train\.rewards\.0\.function: .*{reason}"):
            _score(file, name)


def test_async_functions_and_async_objects_are_recognized(file: Path) -> None:
    for name, expected in (("named", False), ("later", True), ("judge", True)):
        function = FunctionReward("key", f"{file}:{name}", returns="trajectory")
        assert function.is_async is expected, name

    async def judged(completion: str, strictness: int) -> float:
        return float(len(completion) > strictness)

    assert is_async(functools.partial(judged, strictness=1))


@pytest.mark.parametrize(
    "value", [1, 1.0, True, Fraction(1), np.float32(1), np.int64(1), np.bool_(True), np.float64(1), {"reward": True}]
)
def test_every_kind_of_number_is_a_reward(value: Any) -> None:
    worth = read_worth(value, REQUEST, returns="trajectory")
    assert worth == Worth(reward=1.0)
    assert type(worth.reward) is float


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("1", "expected a number, got str"),
        (None, "expected a number, got NoneType"),
        ([1.0], "expected a number, got list"),
        (1j, "expected a number, got complex"),
        (np.ones(1), "expected a number, got ndarray"),
        ({}, "expected a number under 'reward', got the keys none"),
        ({"score": 1}, "expected a number under 'reward', got the keys score"),
        ({"reward": None}, "expected a number under 'reward', got the keys reward"),
        ({"reward": "1"}, "the reward: expected a number, got str"),
        ({"token_rewards": 1}, "token_rewards: expected a list of numbers, got int"),
        ({"token_rewards": "abc"}, "token_rewards: expected a list of numbers, got str"),
        ({"token_rewards": [1, 2, "3"]}, r"token_rewards\[2\]: expected a number, got str"),
        ({"token_rewards": [1, 2]}, "token_rewards: expected one number for each of the 3 completion ids, got 2"),
        ({"turn_rewards": [1, 2, 3]}, "turn_rewards: expected one number for each of the 2 turns, got 3"),
    ],
)
def test_a_value_that_is_no_reward_is_refused_with_the_reason(value: Any, told: str) -> None:
    with pytest.raises(RewardError, match=told) as caught:
        read_worth(value, REQUEST, returns="token")
    assert caught.value.reason == "reward_wrong_type"


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, np.float32("nan"), 10**400, {"reward": -math.inf}, {"token_rewards": [0, math.nan, 0]}],
)
def test_an_infinite_or_nan_reward_is_refused(value: Any) -> None:
    with pytest.raises(RewardError) as caught:
        read_worth(value, REQUEST, returns="token")
    assert caught.value.reason == "reward_out_of_range"


def test_token_and_turn_rewards_add_up_if_no_sum_is_given() -> None:
    worth = read_worth({"token_rewards": np.array([1, 0, 0.5]), "turn_rewards": (0, 2)}, REQUEST, returns="token")
    assert worth == Worth(reward=3.5, token_rewards=(1, 0, 0.5), turn_rewards=(0, 2))
    assert read_worth({"reward": 9, "turn_rewards": [0, 2]}, REQUEST, returns="token").reward == 9


@pytest.mark.parametrize("key", ["token_rewards", "turn_rewards"])
def test_token_rewards_are_refused_unless_algorithm_returns_is_token(key: str) -> None:
    with pytest.raises(RewardError, match=r"need algorithm\.returns=token, but this run has trajectory") as caught:
        read_worth({"reward": 1, key: [1, 2, 3]}, REQUEST, returns="trajectory")
    assert caught.value.reason == "reward_wrong_type"
    assert read_worth({"reward": 1, key: None}, REQUEST, returns="trajectory") == Worth(reward=1)


def test_a_detail_starts_with_a_summary_and_keeps_the_traceback_s_end() -> None:
    def deep(depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 1000 + "\nsecond line")
        shallow(depth) if depth % 2 else deep(depth - 1)

    def shallow(depth: int) -> None:  # in turns, since a traceback does not write equal frames twice
        deep(depth - 1)

    with pytest.raises(ValueError, match="second line") as caught:
        deep(100)
    detail = described(caught.value)
    summary, _, place = RewardError("reward_error", detail).summary.partition(" (")
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+\)", place), "the line that raised the error"
    assert summary == f"ValueError: {'x' * (488 - len(place) - 2)}"
    assert detail.endswith("second line")
    assert len(detail) == 500 + 1 + 4000
    assert shortened(detail) == detail
    assert RewardError("reward_timeout", "late").summary == "late"
