"""Mathematical answers: equal and different forms, also on the real MATH-500 if present."""

import asyncio
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.reward_pools import PoolOnALoop
from support.reward_requests import reward_request

from areal_rloo.config import Config, DataConfig, SourceConfig
from areal_rloo.errors import DataError, RewardError
from areal_rloo.rewards.parts import scorer_argument
from areal_rloo.tasks import Item, load_train
from areal_rloo.tasks.math import MathTask, extract_boxed, math_reward


def boxed(answer: str) -> str:
    return rf"So the answer is $\boxed{{{answer}}}$."


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{3}", "3"),
        (r"\boxed{\frac{1}{2}} and then \boxed{ \sqrt{2} }.", r"\sqrt{2}"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{\text{(A) } x_{1}}", r"\text{(A) } x_{1}"),
        ("no box 5", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box_counts_with_its_braces_balanced(text: str, answer: str | None) -> None:
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", r"\dfrac12"),
        (r"\frac{3}{4}", "3/4"),
        (r"5\sqrt{2}", r"\sqrt{50}"),
        ("x^2-1", "(x-1)(x+1)"),
        ("5", "x = 5"),
        ("10000", "10,000"),
        (r"120^\circ", "120"),
        (r"\text{(C)}", "C"),
        (r"\text{even}", "Even"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\$18.90", "18.90"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
        ("6", r"2\cdot 3"),
        ("18", r"18\text{ apples}"),
    ],
)
def test_rewritten_answers_are_right(gold: str, answer: str) -> None:
    assert math_reward(boxed(answer), gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("3", "3, 4"),
        ("3", r"3 \text{ or } 4"),
        (r"\frac{1}{3}", "0.333"),
        (r"\frac{1}{3}", "0.333333"),
        (r"\pi", "3.14159265"),
        ("1", "1.0000001"),
        ("(1,2)", "[1,2]"),
        (r"\text{odd}", "even"),
        (r"\text{even}", "vene"),
        (r"\text{Evelyn}", "Everly"),
        ("5", "6=5"),
        ("5", r"\text{not }5"),
        ("5", ""),
        ("5", "9" * 3000),
        ("12", "21"),
    ],
)
def test_other_answers_are_wrong(gold: str, answer: str) -> None:
    assert math_reward(boxed(answer), gold) == 0.0


def test_a_right_number_outside_the_box_gets_no_reward() -> None:
    assert math_reward("The answer is 5.", "5") == 0.0
    assert math_reward(r"It is 5, so \boxed{6}.", "5") == 0.0


def _rows(data_folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (data_folder / "math500" / "test.jsonl").read_text().splitlines()]


def test_gold_solutions_of_math_500_and_rewritten_answers_are_right(data_folder: Path) -> None:
    rows = _rows(data_folder)
    assert len(rows) == 500
    solved = sum(math_reward(row["solution"], row["answer"]) for row in rows)
    assert solved / len(rows) >= 0.995
    for rewrite in (
        lambda answer: answer,
        lambda answer: answer.replace(r"\frac", r"\dfrac"),
        lambda answer: answer.replace(r"\left", "").replace(r"\right", ""),
        lambda answer: re.sub(r"([,+=])", r" \1 ", answer),
    ):
        right = sum(math_reward(boxed(rewrite(row["answer"])), row["answer"]) for row in rows)
        assert right / len(rows) >= 0.995


def test_gold_answers_of_other_problems_are_wrong(data_folder: Path) -> None:
    """120 degrees and 120 are the only pair of different texts in MATH-500 that a reader would call equal."""
    answers = [row["answer"] for row in _rows(data_folder)]
    shuffled = random.Random(0).sample(answers, len(answers))
    taken = {
        (gold, other)
        for gold, other in zip(answers, shuffled, strict=True)
        if gold.replace(" ", "") != other.replace(" ", "") and math_reward(boxed(other), gold)
    }
    assert all(gold.replace(r"^\circ", "") == other.replace(r"^\circ", "") for gold, other in taken)


def test_every_item_of_math_500_and_svamp_is_read_with_its_answer(data_folder: Path) -> None:
    for task, num in (("math", 500), ("svamp", 1000)):
        path = str(data_folder / {"math": "math500"}.get(task, task) / "test.jsonl")
        data = DataConfig(train=SourceConfig(task=task, path=path), eval=None)
        items = load_train(data, seed=0)[0].items
        assert len(items) == num
        assert all(item.prompt and item.answer for item in items)


@pytest.mark.parametrize(
    "answer",
    [
        r"41 \\ 42 \\ 43", "41 $ 42 $ 43", r"1 \to 43", r"41 \implies 43", r"1 \equiv 43", r"43 \approx 42", "x=1=2=43",
        r"41 \text{ or } 43", r"41 \text{or} 43", r"1 \Rightarrow 43", "42 ≈ 43", "41, 42, 43", "41 or 43",
        r"41 \iff 43", r"41 \rightarrow 43", "41; 43", r"\{41, 43\}", "41/43",
    ],
)  # fmt: skip
def test_several_answers_in_a_box_get_no_reward(answer: str) -> None:
    assert math_reward(boxed(answer), "43") == 0.0


@pytest.mark.parametrize("answer", [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"x \equiv 2", "x=2", "1, 2"])
def test_an_answer_written_like_the_gold_answer_is_right(answer: str) -> None:
    assert math_reward(boxed(answer), answer) == 1.0
    assert math_reward(boxed(answer.replace("2", "3")), answer) == 0.0


def test_an_endless_comparison_times_out_and_spares_other_answers(tmp_path: Path) -> None:
    """sympy would try to write 9^(9^(9^9)) down."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"problem": "?", "answer": "5"}) + "\n")
    data = DataConfig(train=SourceConfig(task="math", path=str(tmp_path / "a.jsonl")), eval=None)
    argument = scorer_argument(Config(data=data), (("train", "math", "math"),))
    pool = PoolOnALoop("areal_rloo.rewards.parts:make_scorer", argument, num_workers=1, deadline_s=12.0)

    async def outcome(answer: str) -> float | str:
        try:
            item = Item("?", "5", "math")
            return (await pool.score(reward_request(boxed(answer), item), "math")).reward
        except RewardError as error:
            return error.reason

    async def scenario() -> list[float | str]:
        return list(await asyncio.gather(*map(outcome, ["5", "9^{9^{9^{9}}}", "5", "10-5"])))

    assert asyncio.run(scenario()) == [1.0, "reward_timeout", 1.0, 1.0]
    pool.close()


@pytest.mark.parametrize(
    ("messages", "solution", "answer"),
    [
        (["What is 1 + 1?"], "$2$", "2"),
        (["Be short.", "What is a half?"], r"$\dfrac{1}{2}$", "0.5"),
        (["Is 7 a prime?"], "Yes", r"\text{yes}"),
        (["What is 1 + 1?"], r"Adding gives $\boxed{2}$.", "2"),
    ],
)
def test_a_set_for_trl_s_accuracy_reward_is_read_as_it_is(
    messages: list[str], solution: str, answer: str, tmp_path: Path
) -> None:
    """The columns of trl-lib/DeepMath-103K, the set of TRL's own example of RLOO."""
    roles = ["system", "user"][-len(messages) :]
    prompt = [{"role": role, "content": content} for role, content in zip(roles, messages, strict=True)]
    (item,) = _items({"prompt": prompt, "solution": solution}, tmp_path)
    assert [message.content for message in item.messages][:-1] == messages[:-1]
    assert item.messages[-1].content.startswith(messages[-1])
    assert r"\boxed{}" in item.messages[-1].content
    assert math_reward(boxed(answer), item.answer) == 1.0
    assert math_reward(boxed("3"), item.answer) == math_reward(answer, item.answer) == 0.0


def test_a_prompt_of_such_a_set_may_be_a_text(tmp_path: Path) -> None:
    (item,) = _items({"prompt": "What is 1 + 1?", "solution": "$2$"}, tmp_path)
    assert isinstance(item.prompt, str)
    assert item.prompt.startswith("What is 1 + 1?\n")
    assert r"\boxed{}" in item.prompt


@pytest.mark.parametrize(
    "solution",
    [
        *("First, add.\nThis gives 2.", "We get x = 5, thus x^2 = 25", "3 + 4 = 7 #### 7", "Tom has 3 apples"),
        *(r"The answer is \boxed{}", r"\boxed{}", "", "$$"),
    ],
)
def test_a_derivation_without_a_box_is_no_answer(solution: str, tmp_path: Path) -> None:
    expected = r"rows\.jsonl:1: expected a text field 'answer', or a 'solution' with an answer"
    with pytest.raises(DataError, match=expected):
        _items({"prompt": "1 + 1?", "solution": solution}, tmp_path)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [("$2$", "2"), ("$$ 2 $$", "2"), (r"18\$", r"18\$"), ("$1$ and $2$", "$1$ and $2$"), ("Not enough data", None)],
)
def test_dollars_around_a_solution_are_taken_off_as_a_pair(solution: str, answer: str | None, tmp_path: Path) -> None:
    (item,) = _items({"problem": None, "prompt": "1 + 1?", "solution": solution}, tmp_path)
    assert item.answer == (answer or solution)


def test_a_demonstration_ends_with_the_answer_in_a_box(tmp_path: Path) -> None:
    task = MathTask(SourceConfig(task="math"), seed=0)
    rows = [
        {"problem": "3 + 4?", "answer": "7", "solution": "3 + 4 = 7, so Tom has 7."},
        {"prompt": "?", "solution": "$2$"},
    ]
    shown = [task.demonstration(item) for row in rows for item in _items(row, tmp_path)]
    assert shown == ["3 + 4 = 7, so Tom has 7.\n\\boxed{7}", "\\boxed{2}"]


def _items(row: dict[str, object], folder: Path) -> Sequence[Item]:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    data = DataConfig(train=SourceConfig(task="math", path=str(folder / "rows.jsonl")))
    (source,) = load_train(data, seed=0, most_item_bytes=10**6)
    return source.items
