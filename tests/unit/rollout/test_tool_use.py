"""Episodes with tools: calls, results, and the messages that a wrong call gets."""

import asyncio

import pytest
from support.episodes import CHAT_ML, RewardsByTurn, ScriptedTurns, episode_config

from areal_rloo.errors import DataError
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.rollout.episode import Sample
from areal_rloo.rollout.episode_types import make_episode
from areal_rloo.rollout.multi_turn import tool_calls
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.tasks.tools import tool_schemas
from areal_rloo.trajectory import Item, Trajectory

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "17*23"}}</tool_call>'


def _run_tools(texts: list[str], *overrides: str, template: str | None = None) -> tuple[Trajectory, ScriptedTurns, str]:
    config = episode_config("rollout.episode.type=tool_use", *overrides)
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    chat = ChatFormat(tokenizer, config.data, tools=tool_schemas(config.rollout.episode))
    engine, rewards = ScriptedTurns(texts), RewardsByTurn(1.0)
    item = Item("17*23=?\n")
    sample = Sample((1, 0), "train", item, chat.prompt(item))
    (trajectory,) = asyncio.run(make_episode(config).run(sample, engine, rewards, chat))
    return trajectory, engine, rewards.requests[0].completion


def test_the_next_turn_continues_after_the_tool_s_result() -> None:
    trajectory, engine, scored = _run_tools([CALL, "#### 391"])
    assert engine.seen[0].startswith("You can call:\ncalculator(expression): Compute")
    assert engine.seen[0].endswith("</tool_call>\n17*23=?\n")
    assert engine.seen[1] == engine.seen[0] + CALL + "<eos>\n<tool_response>391</tool_response>\n"
    assert scored == "#### 391"  # what a tool said is no answer
    assert len(trajectory.completion.spans) == 3


def test_a_template_writes_the_end_of_turn_once() -> None:
    _, engine, _ = _run_tools([CALL, "#### 391"], template=CHAT_ML)
    assert engine.seen[1] == engine.seen[0] + CALL + "<eos>\n<|im_start|>tool\n391<eos>\n<|im_start|>assistant\n"


def test_python_tool_runs_and_bad_calls_get_an_error_message() -> None:
    program = '{"name": "python", "arguments": {"code": "print(sum(range(10)))"}}'
    for call, said in (
        (program, "45"),
        ('{"name": "calculater", "arguments": {}}', "error: there is no tool 'calculater'; there are python"),
        ('{"name": "\\ud83d", "arguments": {}}', "error: there is no tool '\\ud83d'; there are python"),
        ('{"name": "python", "arguments": {"code": ' + "1" * 5000 + "}}", "error: the call is not valid JSON"),
        ("{", "error: the call is not valid JSON"),
        ("[1]", 'error: expected {"name"'),
        ("[" * 100_000, "error: the call is not valid JSON"),
    ):
        _, engine, _ = _run_tools(
            [f"<tool_call>{call}</tool_call>", "x"], "rollout.episode.tools=[python]", "data.max_prompt_tokens=512"
        )
        assert f"<tool_response>{said}" in engine.seen[1]


def test_an_episode_ends_at_max_turns_and_runs_parallel_calls() -> None:
    trajectory, engine, _ = _run_tools([CALL] * 3, "rollout.episode.max_turns=2")
    assert len(engine.seen) == 2
    assert len(trajectory.completion.spans) == 3  # nothing stands behind the policy's last word
    several = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>' * 2
    _, engine, _ = _run_tools([several, "x"])
    assert engine.seen[1].endswith("<tool_response>2</tool_response>\n<tool_response>2</tool_response>\n")


def test_the_call_of_a_cut_turn_is_not_run() -> None:
    cut, engine, _ = _run_tools([CALL + "~", "y"])  # the call is whole, the turn is not
    assert len(engine.seen) == 1
    assert cut.completion.finish_reason == "length"


def test_only_closed_calls_are_calls() -> None:
    assert tool_calls("a<tool_call> x </tool_call>b<tool_call>y</tool_call><tool_call>z") == ["x", "y"]
    assert tool_calls("</tool_call><tool_call>") == []


def test_a_template_without_tool_results_is_refused_at_start() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ raise_exception('no tools') if m.role == 'tool' }}{% endfor %}"
    config = episode_config("rollout.episode.type=tool_use")
    ChatFormat(tokenizer, config.data)
    with pytest.raises(DataError, match=r"the model's template refuses the roles user, assistant, tool: no tools"):
        ChatFormat(tokenizer, config.data, tools=tool_schemas(config.rollout.episode))
