"""Wrong options of an episode are refused with the key."""

import pytest

from areal_rloo.config import load_config
from areal_rloo.errors import ConfigError


@pytest.mark.parametrize(
    ("episode", "words"),
    [
        (
            "{type: multi}",
            "rollout.episode.type: expected one of single_turn, multi_turn, tool_use, agent, or module:Class",
        ),
        (
            "{type: agent}",
            "rollout.episode.agent: type=agent needs a function, module:function or path/to/file.py:function",
        ),
        (
            "{agent: 'a.py:b'}",
            "rollout.episode.agent: expected rollout.episode.type=agent with a.py:b, got single_turn; set the type",
        ),
        ("{max_turns: 3}", "rollout.episode.max_turns: nothing reads it with type=single_turn; leave it out"),
        ("{type: tool_use, feedback: no}", "rollout.episode.feedback"),
        ("{type: agent, agent: a:b, timeout_s: 3}", "rollout.episode.agent_timeout_s: expected at most"),
        (
            "{type: multi_turn, agent_timeout_s: 3}",
            "rollout.episode.agent_timeout_s: nothing reads it with type=multi_turn",
        ),
        ("{type: tool_use, tools: []}", "rollout.episode.tools: expected different tools, at least one, got []"),
        ("{type: tool_use, tools: [calculator, calculator]}", "rollout.episode.tools: expected different tools"),
        ("{type: tool_use, tools: [abacus]}", "rollout.episode.tools"),
        ("{type: tool_use, python: {cpu_s: 1}}", "rollout.episode.python: nothing reads it with tools=['calculator']"),
    ],
)
def test_a_wrong_episode_is_refused_with_its_key(episode: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart.yaml", [f"rollout.episode={episode}"])
    assert words in str(caught.value)
