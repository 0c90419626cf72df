"""Sources of a mixture with their own episodes, tools and limits."""

import asyncio
from pathlib import Path

import yaml
from support.episodes import CHAT_ML, RewardsByTurn, ScriptedTurns

from areal_rloo.config import Config, load_config
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.rollout.agent import Agent
from areal_rloo.rollout.episode import Sample
from areal_rloo.rollout.episode_types import BySource, make_episode, serving
from areal_rloo.rollout.worker import sampling_of
from areal_rloo.tasks.chat import Tokenizer, chat_format
from areal_rloo.trajectory import Item, Purpose, Trajectory

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "17*23"}}</tool_call>'
DATA = {
    "train": [
        {"name": "plain", "max_new_tokens": 20},
        {"name": "tools", "episode": {"type": "tool_use", "max_turns": 3, "max_turn_tokens": 50}},
        {"name": "tries", "episode": {"type": "multi_turn", "max_turns": 2, "feedback": "No."}},
    ],
    "eval": [
        {"name": "tools"},
        {"name": "plain"},
        {"name": "held", "episode": {"type": "tool_use", "tools": ["python"]}},
    ],
}


def _config(folder: Path, *overrides: str) -> Config:
    (folder / "my.yaml").write_text(yaml.safe_dump({"data": {**DATA, "max_prompt_tokens": 512}}))
    return load_config(str(folder / "my.yaml"), ["rollout.sampling.max_new_tokens=96", *overrides])


def _run(config: Config, source: str, texts: list[str]) -> tuple[Trajectory, ScriptedTurns]:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = CHAT_ML.replace(
        "{% for", "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for", 1
    )
    chat, engine = chat_format(tokenizer, config), ScriptedTurns(texts)
    item = Item("17*23=?", source=source)
    tokens = Tokenizer(chat, config.data)(item, 1)
    assert tokens is not None
    sample = Sample((1, 0), "train", item, tokens)
    (trajectory,) = asyncio.run(make_episode(config).run(sample, engine, RewardsByTurn(0.0), chat))
    return trajectory, engine


def test_each_source_runs_its_own_episode_with_its_own_tools(tmp_path: Path) -> None:
    config = _config(tmp_path)
    asked, end = "<|im_start|>user\n17*23=?<eos>\n<|im_start|>assistant\n", "<eos>\n<|im_start|>assistant\n"
    for source, texts, seen in (
        ("plain", [CALL], [asked]),
        (
            "tools",
            [CALL, "391"],
            [f"[calculator]{asked}", f"[calculator]{asked}{CALL}<eos>\n<|im_start|>tool\n391{end}"],
        ),
        ("tries", ["390", "391"], [asked, f"{asked}390<eos>\n<|im_start|>user\nNo.{end}"]),
        ("held", ["391"], [f"[python]{asked}"]),
    ):
        trajectory, engine = _run(config, source, texts)
        assert engine.seen == seen
        assert len(trajectory.completion.spans or (1,)) == 2 * len(seen) - 1


def test_each_source_has_its_own_limits(tmp_path: Path) -> None:
    config = _config(tmp_path, "evaluation.max_new_tokens=64")
    limits: dict[tuple[Purpose, str], int] = {
        **{("train", "plain"): 20, ("train", "tools"): 96, ("eval", "plain"): 64, ("eval", "tools"): 64},
        **{("train", "unknown"): 96},
    }
    for (purpose, source), limit in limits.items():
        sample = Sample((1, 0), purpose, Item("p", source=source), (2,))
        assert sampling_of(config, sample, 0, ()).max_new_tokens == limit
    assert _config(tmp_path).max_new_tokens_of("eval", "plain") == 20  # as in training
    assert [config.episode_of(label).max_turn_tokens for label in ("plain", "tools", "unknown")] == [None, 50, None]


def test_a_set_has_the_episode_of_the_source_of_the_same_name(tmp_path: Path) -> None:
    config = _config(tmp_path, "rollout.episode.timeout_s=77")
    assert [source.episode and source.episode.type for source in config.data.eval_sources] == [
        "tool_use",
        None,
        "tool_use",
    ]
    assert {episode.timeout_s for episode in config.episodes.values()} == {77}


def test_an_agent_of_the_run_serves_beside_an_episode_of_a_source(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def solve(): ...\n")
    agent = f"rollout.episode={{type: agent, agent: '{tmp_path}/agent.py:solve'}}"
    config = _config(tmp_path, agent)
    episode = make_episode(config)
    assert isinstance(episode, BySource)
    assert isinstance(serving(episode), Agent)
    _, engine = _run(config, "tools", [CALL, "391"])
    assert len(engine.seen) == 2
    assert config.episode_of("plain").agent is not None
