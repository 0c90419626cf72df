"""The reward of a source, from the config to a weighted sum, with all processes."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from support.metric_names import metric_names
from support.processes import children_with
from support.reward_requests import reward_request

from areal_rloo.config import Config, load_config
from areal_rloo.errors import ConfigError, ModelError, RewardError
from areal_rloo.rewards import check_rewards, make_scoring
from areal_rloo.rewards.request import RewardRequest, Scored, Worth
from areal_rloo.rewards.scoring import Part, Scoring, SourceRewards
from areal_rloo.tasks import check_data
from areal_rloo.trajectory import Item

FUNCTIONS = """
import asyncio, os, sys

def exact(completion, answer):
    return completion == answer

def short(completion, scale):
    return -scale * len(completion)

def fails(completion):
    raise ValueError("no such thing")

def dense(completion_ids, turns):
    return {"token_rewards": [1] * len(completion_ids), "turn_rewards": [3] * len(turns)}

def sparse(completion_ids):
    return {"reward": 1, "token_rewards": [0] * (len(completion_ids) - 1) + [1]}

def without_torch(completion):
    return "torch" not in sys.modules and "aiohttp" not in sys.modules

async def judge(completion):
    await asyncio.sleep(0.01)
    if completion == "crash":
        os._exit(1)
    return 0.25

def process(**_):
    return os.getpid()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    return str(tmp_path / "mine.py")


def _config(file: str, *rewards: dict[str, Any], overrides: tuple[str, ...] = ()) -> Config:
    """Return a config with custom rows, these rewards, and a worker process of each kind."""
    rows = Path(file).with_name("rows.jsonl")
    parts = json.dumps(rewards, default=str)
    return load_config(
        "quickstart.yaml",
        [
            f"data.train={{task: rows, path: {rows}, rewards: {parts}}}",
            "data.eval=null",
            "rollout.num_reward_workers=1",
            "rollout.reward_timeout_s=5",
            *overrides,
        ],
    )


TOKENS = (
    "algorithm.returns=token",
    "algorithm.reward_norm={mean_level: group, mean_leave1out: true}",
    "algorithm.adv_norm={mean_level: none, mean_leave1out: false}",
)


def _request(completion: str, source: str = "rows", purpose: Any = "train", **fields: Any) -> RewardRequest:
    return reward_request(
        completion,
        Item("1+1", "2", source=source, fields=fields),
        purpose=purpose,
        turns=("", completion),
        completion_ids=(2, 3, 4),
    )


def _run(config: Config, scenario: Callable[[Scoring], Awaitable[Any]]) -> Any:
    async def with_scoring() -> Any:
        scoring = await make_scoring(config)
        try:
            return await scenario(scoring)
        finally:
            await scoring.close()

    return asyncio.run(with_scoring())


def _processes() -> list[psutil.Process]:
    return children_with("areal_rloo.rewards")


def test_parts_are_summed_with_their_weights_and_reported_by_name(file: str) -> None:
    config = _config(
        file,
        {"function": f"{file}:exact", "weight": 2},
        {"function": f"{file}:short", "name": "brevity", "weight": 0.5},
        {"function": f"{file}:judge", "weight": -4},
    )

    async def scenario(scoring: Scoring) -> None:
        assert len(_processes()) == 2  # one for what computes, one for what waits
        scored = await scoring.score(_request("2", scale=3))
        assert scored == Scored(reward=2 - 1.5 - 1, parts={"exact": 1, "brevity": -3, "judge": 0.25})
        assert scoring.statistics().scored == 1

    _run(config, scenario)
    assert _processes() == []


def test_services_and_models_are_summed_like_other_parts(file: str, tmp_path: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from areal_rloo.models.tiny import make_tiny_tokenizer

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(
        Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=258, num_labels=1, pad_token_id=0)
    )
    model.save_pretrained(tmp_path / "model")
    make_tiny_tokenizer().save_pretrained(tmp_path / "model")

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"reward": len((await request.json())["completion"])})

    async def scenario() -> Scored:
        app = web.Application()
        app.router.add_post("/score", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        scoring = await make_scoring(
            _config(
                file,
                {"url": f"http://127.0.0.1:{runner.addresses[0][1]}/score", "name": "service"},
                {"model": tmp_path / "model", "name": "model", "weight": 3},
                {"model": tmp_path / "model", "name": "again", "weight": -3, "batch_size": 2},
                {"function": f"{file}:exact"},
            )
        )
        scored = await scoring.score(_request("2"))
        assert scoring.statistics().busy_s.keys() == {"processes", "services", "data.train.rewards.1.model"}
        assert sum(scoring.statistics().busy_s.values()) > 0
        await scoring.close()
        await runner.cleanup()
        return scored

    scored = asyncio.run(scenario())
    assert scored.parts.keys() == {"service", "model", "again", "exact"}
    assert (scored.parts["service"], scored.parts["exact"]) == (1, 1)
    assert scored.parts["model"] == scored.parts["again"] != 0
    assert scored.reward == pytest.approx(2)


def test_a_source_without_rewards_uses_its_task_s_reward() -> None:
    config = load_config("quickstart.yaml", ["data.eval=null", "rollout.num_reward_workers=1"])

    async def scenario(scoring: Scoring) -> None:
        scored = await scoring.score(_request("1+1=2\n2", source="arithmetic"))
        assert scored.parts == {"arithmetic": scored.reward}

    _run(config, scenario)


def test_the_item_s_source_and_split_decide_the_reward(file: str) -> None:
    rows = Path(file).with_name("rows.jsonl")
    config = load_config(
        "quickstart.yaml",
        [
            f"data.train=[{{task: rows, name: a, path: {rows}, rewards: [{{function: '{file}:exact'}}]}}, "
            f"{{task: rows, name: b, path: {rows}, rewards: [{{function: '{file}:short'}}]}}]",
            f"data.eval={{task: rows, name: a, path: {rows}, rewards: [{{function: '{file}:judge'}}]}}",
            "rollout.num_reward_workers=1",
        ],
    )

    async def scenario(scoring: Scoring) -> None:
        assert (await scoring.score(_request("2", "a"))).parts == {"exact": 1}
        assert (await scoring.score(_request("2", "b", scale=1))).parts == {"short": -1}
        assert (await scoring.score(_request("2", "a", "eval"))).parts == {"judge": 0.25}

    _run(config, scenario)


def test_a_failing_part_is_named_and_drops_only_its_sample(file: str) -> None:
    config = _config(file, {"function": f"{file}:short"}, {"function": f"{file}:judge"})

    async def scenario(scoring: Scoring) -> None:
        for completion, fields, reason, told in (
            ("2", {}, "reward_error", "short: short has the parameter 'scale', which nothing fills"),
            ("2", {"scale": float("inf")}, "reward_out_of_range", "short: the reward is -inf"),
            ("crash", {"scale": 1}, "reward_crash", "judge: its worker process ended with code 1"),
        ):
            with pytest.raises(RewardError) as caught:
                await scoring.score(_request(completion, **fields))
            assert caught.value.reason == reason
            assert caught.value.completion == completion
            assert caught.value.summary.startswith(told)
        assert (await scoring.score(_request("2", scale=1))).reward == -0.75
        statistics = scoring.statistics()
        assert statistics.dropped == {"reward_error": 1, "reward_out_of_range": 1, "reward_crash": 1}
        assert (statistics.scored, sum(statistics.dropped.values()), statistics.restarts) == (1, 3, 1)

    _run(config, scenario)


def test_the_first_line_of_a_failed_part_names_it_and_the_exception(file: str) -> None:
    async def scenario(scoring: Scoring) -> None:
        with pytest.raises(RewardError) as caught:
            await scoring.score(_request("2"))
        assert re.fullmatch(r"fails: ValueError: no such thing \(.*/mine\.py:\d+\)", caught.value.summary)
        assert "Traceback" in caught.value.detail

    _run(_config(file, {"function": f"{file}:fails"}), scenario)


def test_token_and_turn_rewards_are_summed_with_the_part_weights(file: str) -> None:
    parts = [{"function": f"{file}:dense", "weight": 2}, {"function": f"{file}:sparse"}, {"function": f"{file}:exact"}]

    async def scenario(scoring: Scoring) -> None:
        assert await scoring.score(_request("2")) == Scored(
            reward=2 * (3 + 6) + 1 + 1,
            parts={"dense": 9, "sparse": 1, "exact": 1},
            token_rewards=(2, 2, 3),
            turn_rewards=(6, 6),
        )

    _run(_config(file, *parts, overrides=TOKENS), scenario)


def test_token_rewards_are_refused_unless_returns_is_token(file: str) -> None:
    async def scenario(scoring: Scoring) -> None:
        with pytest.raises(RewardError, match=r"sparse: token_rewards: .*algorithm\.returns=token") as caught:
            await scoring.score(_request("2"))
        assert caught.value.reason == "reward_wrong_type"

    _run(_config(file, {"function": f"{file}:sparse"}), scenario)


def test_a_weighted_sum_that_overflows_is_no_reward() -> None:
    async def huge(request: RewardRequest) -> Worth:
        return Worth(reward=1e308)

    async def nothing() -> None:
        pass

    async def scenario() -> None:
        scoring = Scoring({("train", "rows"): SourceRewards([Part("huge", 10.0, huge)])}, [], nothing)
        with pytest.raises(RewardError, match="a weighted sum of the parts is inf") as caught:
            await scoring.score(_request("2"))
        assert caught.value.reason == "reward_out_of_range"

    asyncio.run(scenario())


def test_final_answers_are_found_only_for_evaluations_with_votes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"problem": "?", "answer": "5"}\n')
    several = "num_samples: 4, temperature: 1"
    config = load_config(
        "quickstart.yaml",
        [
            f"data.train={{task: math, path: {tmp_path}/a.jsonl}}",
            f"data.eval=[{{task: math, name: one, path: {tmp_path}/a.jsonl}}, "
            f"{{task: math, name: four, path: {tmp_path}/a.jsonl, {several}}}]",
            "rollout.num_reward_workers=1",
        ],
    )

    async def scenario(scoring: Scoring) -> None:
        texts = [r"so it is \boxed{5}", r"\boxed{5}"]
        four = [await scoring.score(_request(text, "four", "eval")) for text in texts]
        assert [scored.parts.keys() for scored in four] == [{"math"}, {"math"}]
        assert [scored.answer for scored in four] == ["5", "5"]
        assert (await scoring.score(_request(texts[0], "one", "eval"))).answer is None
        assert (await scoring.score(_request(texts[0], "math"))).answer is None

    _run(config, scenario)


def test_a_function_s_process_has_no_torch(file: str) -> None:
    async def scenario(scoring: Scoring) -> None:
        assert (await scoring.score(_request("2"))).reward == 1

    _run(_config(file, {"function": f"{file}:without_torch"}), scenario)


def test_a_failed_start_ends_the_runners_that_have_started(file: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    parts = [{"function": f"{file}:exact"}, {"function": f"{file}:judge"}]
    with pytest.raises(ModelError, match=r"data\.train\.rewards\.2\.model: .*no model\.safetensors in it"):
        asyncio.run(make_scoring(_config(file, *parts, {"model": tmp_path / "model"})))
    with pytest.raises(ConfigError, match=r"data\.train\.rewards\.0\.function: .*has no function 'absent'"):
        asyncio.run(make_scoring(_config(file, {"function": f"{file}:absent"})))
    assert _processes() == []


def test_wrong_rewards_are_refused_before_anything_starts(file: str, tmp_path: Path) -> None:
    check_rewards(_config(file, {"function": f"{file}:judge"}, {"task": "gsm8k"}, {"model": "some/model"}).data, {})
    (tmp_path / "empty").mkdir()
    cases = [
        ({"function": f"{file}:absent"}, ConfigError, r"^data\.train\.rewards\.1\.function: .*no function 'absent'"),
        ({"model": tmp_path / "absent"}, ModelError, r"^data\.train\.rewards\.1\.model: .*no such folder"),
        ({"model": tmp_path / "empty"}, ModelError, r"^data\.train\.rewards\.1\.model: .*config\.json cannot be read"),
    ]
    for reward, kind, told in cases:
        with pytest.raises(kind, match=told):
            check_rewards(_config(file, {"function": f"{file}:exact"}, reward).data, {})


def test_a_parameter_that_no_row_fills_is_refused_before_the_start(file: str) -> None:
    rows = Path(file).with_name("rows.jsonl")
    for lines, words in (
        ('{"prompt": "p"}\n' * 98 + '{"prompt": "q", "scale": 2}\n{"prompt": "p"}\n', None),  # a row is enough
        ('{"prompt": "p", "sacle": 1}\n', "short has the parameter 'scale', which nothing fills; .* row sacle$"),
        ('{"prompt": "p"}\n', "short has the parameter 'scale', which nothing fills; .* row no other field$"),
    ):
        rows.write_text(lines)
        data = _config(file, {"function": f"{file}:short"}).data
        check_rewards(data, {})  # no items are known, for example of a dataset on the hub
        if words is None:
            check_rewards(data, check_data(data))
        else:
            with pytest.raises(ConfigError, match=rf"^data\.train\.rewards\.0\.function: {words}"):
                check_rewards(data, check_data(data))


def test_a_final_answer_of_another_type_drops_the_sample(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from areal_rloo.tasks.arithmetic import ArithmeticTask\n"
        "class Mine(ArithmeticTask):\n"
        "    def final_answer(self, completion): return 3\n"
    )
    task = f"task: '{tmp_path / 'mine.py'}:Mine'"
    votes = f"data.eval={{{task}, num_samples: 2, temperature: 1}}"

    async def scenario(scoring: Scoring) -> None:
        with pytest.raises(RewardError, match="final answer: expected a text or None, got int") as caught:
            await scoring.score(_request("2", "Mine", "eval"))
        assert caught.value.reason == "reward_wrong_type"

    _run(load_config("quickstart.yaml", [votes, "rollout.num_reward_workers=1"]), scenario)


def test_checks_import_neither_torch_nor_http_unless_needed(file: str) -> None:
    code = f"""
import asyncio, sys
from areal_rloo.config import load_config
from areal_rloo.rewards import check_rewards
from areal_rloo.tasks import check_data
rows = {str(Path(file).with_name("rows.jsonl"))!r}
config = load_config("quickstart.yaml", [
    f"data.train={{{{task: rows, path: {{rows}}, rewards: [{{{{function: '{file}:exact'}}}}]}}}}", "data.eval=null"])
check_rewards(config.data, check_data(config.data))
print(sorted({{"torch", "aiohttp", "transformers"}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_rewards_have_metrics_of_their_own() -> None:
    names = metric_names()
    assert {"areal_rloo_reward_restarts_total", "areal_rloo_reward_busy_seconds_total"} <= names
