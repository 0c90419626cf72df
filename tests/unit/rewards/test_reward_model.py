"""A reward model gives each completion in a batch the same reward as alone, with tiny models of two kinds."""

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.reward_requests import reward_request
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from areal_rloo.errors import ModelError, RewardError
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.rewards.model import RewardModel
from areal_rloo.rewards.request import RewardRequest
from areal_rloo.trajectory import Item, Message

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
MOST_TOKENS = 256
KEY = "data.train.rewards.0.model"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def _save(folder: Path, kind: str, *, num_labels: int = 1, template: str | None = TEMPLATE) -> Path:
    torch.manual_seed(0)
    common = {**SIZES, "vocab_size": 258, "max_position_embeddings": MOST_TOKENS, "num_labels": num_labels}
    if kind == "decoder":
        config = Qwen2Config(**common, num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1)
        model: Any = Qwen2ForSequenceClassification(config)
    else:
        model = BertForSequenceClassification(BertConfig(**common, pad_token_id=0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)  # logits that differ
    model.save_pretrained(folder)
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: _save(tmp_path_factory.mktemp(kind), kind) for kind in ("decoder", "encoder")}


def _run(
    path: Path,
    scenario: Callable[[RewardModel], Coroutine[Any, Any, Any]],
    *,
    batch_size: int = 16,
    deadline_s: float = 60.0,
) -> Any:
    """What a scenario gives, with the model loaded."""

    async def with_model() -> Any:
        model = RewardModel(str(path), key=KEY, device="cpu", batch_size=batch_size, deadline_s=deadline_s)
        try:
            return await scenario(model)
        finally:
            await model.close()

    return asyncio.run(with_model())


def _request(completion: str, prompt: str | tuple[Message, ...] = "1+1?") -> RewardRequest:
    return reward_request(completion, Item(prompt))


COMPLETIONS = ["", "2", "two", "it is two, I think", "x" * 150, "the answer is: " * 8, "3"]


def _logit(folder: Path, text: str) -> float:
    """Compute the reference: the text alone, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return float(model(torch.tensor([make_tiny_tokenizer()(text)["input_ids"]])).logits[0, 0])


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_batch_gives_each_completion_the_same_reward_as_alone(folders: dict[str, Path], kind: str) -> None:
    async def together(model: RewardModel) -> list[float]:
        worths = await asyncio.gather(*(model.score(_request(text)) for text in COMPLETIONS))
        return [worth.reward for worth in worths]

    alone = [_logit(folders[kind], f"<user>1+1?</user><assistant>{text}</assistant>") for text in COMPLETIONS]
    assert max(alone) - min(alone) > 0.01
    for batch_size in (1, 3, 16):
        rewards = _run(folders[kind], together, batch_size=batch_size)
        assert rewards == pytest.approx(alone, abs=1e-5)


def test_a_conversation_is_written_with_the_model_s_template(folders: dict[str, Path]) -> None:
    prompt = (Message("system", "be brief"), Message("user", "1+1?"))
    expected = _logit(folders["decoder"], "<system>be brief</system><user>1+1?</user><assistant>2</assistant>")

    async def scenario(model: RewardModel) -> None:
        assert (await model.score(_request("2", prompt))).reward == pytest.approx(expected, abs=1e-5)

    _run(folders["decoder"], scenario)


def test_without_a_template_the_completion_follows_the_prompt(tmp_path: Path) -> None:
    folder = _save(tmp_path, "decoder", template=None)
    expected = _logit(folder, "1+1?2")

    async def scenario(model: RewardModel) -> None:
        assert (await model.score(_request("2"))).reward == pytest.approx(expected, abs=1e-5)

    _run(folder, scenario)


def test_waiting_texts_are_scored_in_batches_of_the_configured_size(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = RewardModel._logits

    def counted(self: RewardModel, texts: list[list[int]]) -> list[float]:
        sizes.append(len(texts))
        return real(self, texts)

    monkeypatch.setattr(RewardModel, "_logits", counted)

    async def scenario(model: RewardModel) -> None:
        await asyncio.gather(*(model.score(_request(str(number))) for number in range(40)))

    _run(folders["decoder"], scenario, batch_size=8)
    assert sum(sizes) == 40
    assert max(sizes) == 8


def test_a_text_longer_than_the_context_drops_only_its_sample(folders: dict[str, Path]) -> None:
    async def scenario(model: RewardModel) -> None:
        fits = MOST_TOKENS - len("<user>1+1?</user><assistant></assistant>")
        texts = ["2", "x" * fits, "x" * (fits + 1)]
        outcomes = await asyncio.gather(*(model.score(_request(text)) for text in texts), return_exceptions=True)
        assert isinstance(outcomes[2], RewardError)
        assert outcomes[2].reason == "reward_error"
        assert "have 257 tokens, but the reward model's context has 256" in outcomes[2].summary
        assert not any(isinstance(outcome, BaseException) for outcome in outcomes[:2])

    _run(folders["decoder"], scenario)


def test_a_failing_forward_pass_drops_only_the_failing_text(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RewardModel._logits
    one = len("<user>1+1?</user><assistant>bad!</assistant>")

    def refusing(self: RewardModel, texts: list[list[int]]) -> list[float]:
        if any(len(text) == one for text in texts):
            raise RuntimeError("out of memory")
        logits = zip(texts, real(self, texts), strict=True)
        return [math.nan if len(text) == one + 1 else logit for text, logit in logits]

    monkeypatch.setattr(RewardModel, "_logits", refusing)

    async def scenario(model: RewardModel) -> list[str]:
        texts = ["ok", "bad!", "worse", "yes"]
        outcomes = await asyncio.gather(*(model.score(_request(text)) for text in texts), return_exceptions=True)
        return [outcome.reason if isinstance(outcome, RewardError) else "scored" for outcome in outcomes]

    assert _run(folders["decoder"], scenario) == ["scored", "reward_error", "reward_out_of_range", "scored"]


def test_a_model_without_a_reward_head_is_refused_with_its_key(
    tmp_path: Path, tiny_folders: dict[str, Path], folders: dict[str, Path]
) -> None:
    two = _save(tmp_path / "two", "decoder", num_labels=2)
    cases = [
        (tmp_path / "absent", "auto", r"rewards\.0\.model: cannot load .*absent"),
        (two, "auto", r"rewards\.0\.model: expected a model with one label, .*got 2 labels"),
        (tiny_folders["qwen2"], "auto", r"rewards\.0\.model: .*has no weights for score\.weight; random weights would"),
        (folders["decoder"], "gpu", r"rewards\.0\.device: gpu cannot be used here"),
    ]
    for path, device, told in cases:
        with pytest.raises(ModelError, match=told):
            RewardModel(str(path), key=KEY, device=device, batch_size=1, deadline_s=60.0)


def test_a_model_without_a_pad_token_pads_with_the_end_of_sequence(tmp_path: Path) -> None:
    folder = _save(tmp_path, "decoder")
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    (folder / "config.json").write_bytes(msgspec.json.encode({**config, "pad_token_id": None}))
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)

    async def scenario(model: RewardModel) -> None:
        worths = await asyncio.gather(*(model.score(_request(text)) for text in COMPLETIONS))
        alone = [(await model.score(_request(text))).reward for text in COMPLETIONS]
        assert [worth.reward for worth in worths] == pytest.approx(alone, abs=1e-5)

    _run(folder, scenario)


def test_a_batch_that_hangs_drops_its_completions_and_those_that_wait(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    logits = RewardModel._logits

    def hang(model: RewardModel, texts: Any) -> list[float]:
        goes_on.wait()
        return logits(model, texts)

    monkeypatch.setattr(RewardModel, "_logits", hang)

    async def scenario(model: RewardModel) -> None:
        scores = [asyncio.create_task(model.score(_request(text))) for text in COMPLETIONS]
        await asyncio.sleep(0.1)  # the first batch hangs; the next waits behind it
        scores.append(asyncio.create_task(model.score(_request("late"))))
        failures = await asyncio.gather(*scores, return_exceptions=True)
        assert {getattr(failure, "reason", None) for failure in failures} == {"reward_timeout"}
        assert model.statistics().num_queued == 0, "nobody waits any more"
        goes_on.set()
        monkeypatch.setattr(RewardModel, "_logits", logits)
        while model.statistics().busy_s == 0:  # noqa: ASYNC110 - until the thread has the batch behind it
            await asyncio.sleep(0.01)
        await model.score(_request("afterwards"))

    _run(folders["decoder"], scenario, deadline_s=2.0)


def test_a_batch_that_is_not_full_leaves_room_in_the_statistics(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven texts wait for a batch that runs; then four of them are in the next batch, and the others wait."""
    begin, goes_on = threading.Barrier(2), threading.Semaphore(0)
    logits = RewardModel._logits

    def slow(model: RewardModel, texts: Any) -> list[float]:
        begin.wait()
        goes_on.acquire()
        return logits(model, texts)

    async def scenario(model: RewardModel) -> None:
        monkeypatch.setattr(RewardModel, "_logits", slow)
        scores = [asyncio.create_task(model.score(_request("first")))]
        await asyncio.to_thread(begin.wait)  # alone in its batch
        scores += [asyncio.create_task(model.score(_request(text))) for text in COMPLETIONS]
        await asyncio.sleep(0)
        assert (model.statistics().num_at_once, model.statistics().num_queued) == (4, 7)
        for num_queued in (3, 0):
            goes_on.release()
            await asyncio.to_thread(begin.wait)
            while model.statistics().num_queued != num_queued:  # noqa: ASYNC110 - until the callers have theirs
                await asyncio.sleep(0.01)
        goes_on.release()
        await asyncio.gather(*scores)

    _run(folders["decoder"], scenario, batch_size=4)


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), MemoryError()])
def test_no_exception_of_a_model_ends_its_thread(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    logits = RewardModel._logits

    def fail(model: RewardModel, texts: Any) -> list[float]:
        raise error

    async def scenario(model: RewardModel) -> None:
        monkeypatch.setattr(RewardModel, "_logits", fail)
        with pytest.raises(RewardError, match=f"reward_error: {type(error).__name__}"):
            await model.score(_request("2"))
        monkeypatch.setattr(RewardModel, "_logits", logits)
        await model.score(_request("2"))

    _run(folders["decoder"], scenario)


@pytest.mark.gpu
def test_rewards_on_cuda_equal_rewards_on_cpu(folders: dict[str, Path]) -> None:
    async def scenario(device: str) -> list[float]:
        model = RewardModel(str(folders["decoder"]), key="key", device=device, batch_size=4, deadline_s=60.0)
        worths = await asyncio.gather(*(model.score(_request(text)) for text in COMPLETIONS))
        await model.close()
        return [worth.reward for worth in worths]

    assert asyncio.run(scenario("cuda")) == pytest.approx(asyncio.run(scenario("cpu")), abs=1e-4)
