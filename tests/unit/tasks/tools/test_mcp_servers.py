"""Tools of real MCP servers, over pipes and over HTTP: the schema, results, errors, and servers that die."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.episodes import RewardsByTurn, ScriptedTurns

from areal_rloo.config import Config, EpisodeConfig, load_config
from areal_rloo.errors import ConfigError, EpisodeError
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.rollout.episode import Sample
from areal_rloo.rollout.multi_turn import ToolUse
from areal_rloo.tasks.chat import chat_format
from areal_rloo.tasks.tools import make_tools, mcp_servers
from areal_rloo.trajectory import Item

pytest.importorskip("mcp", reason="needs the extra mcp: make extras")

PROGRAM = Path(__file__).resolve().parents[3] / "support" / "mcp_tools.py"
COMMAND = f"python '{PROGRAM}'"


@pytest.fixture(autouse=True)
def no_servers_of_other_tests() -> None:
    mcp_servers._listed.cache_clear()
    mcp_servers._server.cache_clear()


@contextlib.contextmanager
def _over_http(port: int) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(PROGRAM), str(port)], stderr=subprocess.DEVNULL)
    try:
        ends_s = time.monotonic() + 60
        while time.monotonic() < ends_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _episode(*addresses: str, **options: object) -> EpisodeConfig:
    return EpisodeConfig(type="tool_use", tools=(), mcp_servers=addresses, **options)  # type: ignore[arg-type]


def _check_calls(address: str) -> None:
    tools = make_tools(_episode(address))
    assert list(tools) == ["add", "wait", "pages", "identity", "die"]
    function = tools["add"].schema["function"]
    assert isinstance(function, dict) and function["description"] == "Add two numbers."
    assert function["parameters"]["properties"].keys() == {"a", "b"}

    async def call_all() -> None:
        assert await tools["add"].call({"a": 1, "b": 2}) == "3"
        assert await tools["pages"].call({"query": "x"}) == "x 0\nx 1"
        wrong = await tools["add"].call({"a": "one", "c": 2})
        assert wrong.startswith("error: ")
        many = await asyncio.gather(*(tools["add"].call({"a": number, "b": 1}) for number in range(50)))
        assert many == [str(number + 1) for number in range(50)]
        pids = {await tools["identity"].call({}) for _ in range(3)}
        assert len(pids) == 1, "one server for all calls"

    asyncio.run(call_all())
    asyncio.run(call_all())  # another event loop, as of a later evaluation


def test_tools_over_pipes() -> None:
    _check_calls(COMMAND)


def test_tools_over_http() -> None:
    with _over_http(_free_port()) as address:
        _check_calls(address)


def test_a_slow_call_is_an_error_for_the_model() -> None:
    tools = make_tools(_episode(COMMAND, tool_timeout_s=2.0))

    async def call() -> None:
        assert await tools["add"].call({"a": 1, "b": 2}) == "3"
        assert await tools["wait"].call({"seconds": 600}) == "error: wait took more than 2 s"
        assert await tools["add"].call({"a": 1, "b": 2}) == "3"

    asyncio.run(call())


def test_a_dead_server_is_started_again_and_a_deadly_call_drops_a_sample() -> None:
    tools = make_tools(_episode(COMMAND))

    async def call() -> None:
        before = await tools["identity"].call({})
        with pytest.raises(EpisodeError, match=r"the MCP server python .*mcp_tools\.py'?: .*closed") as caught:
            await tools["die"].call({})
        assert caught.value.reason == "episode_error"
        after = await tools["identity"].call({})
        assert before != after

    asyncio.run(call())


def test_a_restarted_server_serves_and_an_absent_one_drops_samples() -> None:
    port = _free_port()
    with _over_http(port) as address:
        tools = make_tools(_episode(address))

    async def call() -> None:
        with _over_http(port):
            assert await tools["add"].call({"a": 1, "b": 2}) == "3"
        with pytest.raises(EpisodeError, match=r"the MCP server http://127\.0\.0\.1:\d+/mcp: "):
            await tools["add"].call({"a": 1, "b": 2})
        with _over_http(port):
            assert await tools["add"].call({"a": 1, "b": 2}) == "3"

    asyncio.run(call())


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:1/mcp", "/no/such/program", "true", "python -c pass", "python -c 'print(1)'"]
)
def test_a_server_that_cannot_be_reached_is_a_line(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_tools(_episode(address), "data.train.0.episode")
    text = str(caught.value)
    assert text.startswith(f"data.train.0.episode.mcp_servers.0: {address}: cannot list the tools of the server: ")
    assert text.endswith("; start the server, or correct the address") and "\n" not in text


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mcp_servers\.1: .*there is another tool with the name 'add'; leave one"):
        make_tools(_episode(COMMAND, f"python -B '{PROGRAM}'"))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"mcp_servers\.0: needs the `mcp` library: .*'areal-rloo\[mcp\]'") as caught:
        make_tools(_episode(COMMAND))
    assert caught.value.absent


def _config() -> Config:
    servers = f'rollout.episode.mcp_servers=["{COMMAND}"]'
    return load_config("quickstart.yaml", ["rollout.episode.type=tool_use", "rollout.episode.tools=[]", servers])


def test_an_episode_offers_and_calls_the_tools_of_a_server() -> None:
    config = _config()
    chat = chat_format(make_tiny_tokenizer(), config)
    item = Item("1+2=?", "3")
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    engine = ScriptedTurns([call, "3"])
    sample = Sample((1, 0), "train", item, chat.prompt(item))
    asyncio.run(ToolUse(config).run(sample, engine, RewardsByTurn(1.0), chat))
    assert "add(a, b): Add two numbers." in engine.seen[0]
    assert engine.seen[1].endswith(f"{call}<eos>\n<tool_response>3</tool_response>\n")
