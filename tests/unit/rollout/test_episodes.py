"""Episodes: the ids trained on are the ids that were generated, whoever speaks between the policy's turns."""

import asyncio
import gc
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.algorithm.loss import written_by_policy
from areal_rloo.config import Config, DataConfig, load_config
from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.errors import DataError, EngineError, EpisodeError
from areal_rloo.models.files import load_tokenizer
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.rewards.request import RewardRequest, Scored
from areal_rloo.rollout.episode import Conversation, Sample, SampleEngine, Submitter, TurnEngine
from areal_rloo.rollout.episode_types import make_episode
from areal_rloo.rollout.multi_turn import tool_calls
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.tasks.tools import tool_schemas
from areal_rloo.trajectory import Completion, Item, Message, Trajectory

CHAT_ML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 1


class _Watched(EmbeddedEngine):
    """The real engine, remembering what it was asked and what it gave."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[tuple[GenerationRequest, Future[Completion]]] = []
        super().__init__(
            folder, device=torch.device("cpu"), dtype=torch.float32, num_slots=16, context_tokens=256, policy_version=3
        )

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        futures = super().submit(requests)
        self.asked += zip(requests, futures, strict=True)
        return futures


class _Rewards:
    """Worth what each turn says in turn; the last value for all turns after."""

    def __init__(self, *rewards: float) -> None:
        self._rewards = rewards
        self.requests: list[RewardRequest] = []

    async def score(self, request: RewardRequest) -> Scored:
        self.requests.append(request)
        reward = self._rewards[min(len(request.turns), len(self._rewards)) - 1]
        return Scored(reward=reward, parts={"mine": reward})


def _config(*overrides: str) -> Config:
    return load_config("quickstart.yaml", ["rollout.sampling.max_new_tokens=96", *overrides])


def _engine_of(
    submitter: Submitter, number: int, config: Config, *, max_turn_tokens: int | None = None
) -> SampleEngine:
    # Two stop tokens of 258: a turn of the random model ends by itself now and then.
    sampling = SamplingParameters(
        max_new_tokens=config.rollout.sampling.max_new_tokens, seed=number, stop_token_ids=(EOS, 40, 41, 42, 43)
    )
    return SampleEngine(submitter=submitter, name=f"{number}/0", sampling=sampling, max_turn_tokens=max_turn_tokens)


@pytest.mark.parametrize("template", [None, CHAT_ML])
def test_several_turns_train_on_exactly_the_generated_ids(tiny_folders: dict[str, Path], template: str | None) -> None:
    config = _config("rollout.episode.type=multi_turn", "rollout.episode.max_turns=3", "rollout.episode.feedback=no!")
    tokenizer = load_tokenizer(str(tiny_folders["qwen2"]))
    tokenizer.chat_template = template
    chat, episode, rewards = ChatFormat(tokenizer, config.data), make_episode(config), _Rewards(0.0)
    item = Item("1+2=?\n")

    async def scenario() -> list[Sequence[Trajectory]]:
        submitter = Submitter(engine, context_tokens=256)
        samples = [Sample((number, 0), "train", item, chat.prompt(item)) for number in range(24)]
        return list(
            await asyncio.gather(
                *(episode.run(s, _engine_of(submitter, s.sample_id[0], config), rewards, chat) for s in samples)
            )
        )

    engine = _Watched(tiny_folders["qwen2"])
    given_back = asyncio.run(scenario())
    engine.close()
    several = 0
    for number, (trajectory,) in enumerate(given_back):
        asked = [(r, f.result()) for r, f in engine.asked if r.request_id.startswith(f"{number}/0/")]
        completion = trajectory.completion
        everything = [*trajectory.prompt_tokens.tolist(), *completion.tokens.tolist()]
        for request, made in asked:  # what the engine saw is a beginning of what is trained on
            seen = [*request.prompt_tokens, *made.tokens.tolist()]
            assert everything[: len(seen)] == seen
        assert len(everything) == len(asked[-1][0].prompt_tokens) + len(asked[-1][1].tokens)
        mask = written_by_policy(completion.spans, len(completion.tokens))
        assert completion.tokens[mask].tolist() == [t for _, made in asked for t in made.tokens.tolist()]
        logprobs = np.concatenate([made.behaviour_logprobs for _, made in asked])
        assert completion.behaviour_logprobs[mask].tobytes() == logprobs.tobytes()
        assert not completion.behaviour_logprobs[~mask].any()
        assert set(completion.versions.tolist()) == {3}
        assert completion.finish_reason == asked[-1][1].finish_reason
        assert len(completion.tokens) <= config.rollout.sampling.max_new_tokens
        said = chat.text(completion.tokens[~mask].tolist())
        assert said.count("no!") == len(asked) - 1
        assert said.count("assistant") == (len(asked) - 1 if template else 0)
        several += len(asked) > 1
    assert several >= 5
    assert len({request.request_id for request, _ in engine.asked}) == len(engine.asked)


def test_samples_that_start_together_are_submitted_together(tiny_folders: dict[str, Path]) -> None:
    """So that the samples of a group share one prefill."""
    sizes: list[int] = []

    class Counting(_Watched):
        def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
            sizes.append(len(requests))
            return super().submit(requests)

    engine, config = Counting(tiny_folders["qwen2"]), _config()

    async def scenario() -> None:
        submitter = Submitter(engine, context_tokens=256)
        await asyncio.gather(*(_engine_of(submitter, n, config).generate((5, 6)) for n in range(8)))

    asyncio.run(scenario())
    engine.close()
    assert sizes == [8]
    assert engine.statistics().prefill_tokens == 1


def test_a_satisfied_verifier_ends_the_turns_and_earlier_turns_discount(
    tiny_folders: dict[str, Path],
) -> None:
    config = _config(
        "rollout.episode.type=multi_turn", "rollout.episode.max_turns=4", "rollout.episode.turn_discount=0.5"
    )
    chat = ChatFormat(load_tokenizer(str(tiny_folders["qwen2"])), config.data)

    async def outcome(rewards: _Rewards) -> Trajectory:
        sample = Sample((1, 0), "train", Item("?"), (5,))
        (trajectory,) = await make_episode(config).run(
            sample, _Scripted(chat, ["a", "b", "c", "d", "e"]), rewards, chat
        )
        return trajectory

    for rewards, turns, reward in (((1.0,), 1, 1.0), ((0.0, 1.0), 2, 0.5), ((0.0, 0.0, 0.0, 0.5), 4, 0.0625)):
        trajectory = asyncio.run(outcome(_Rewards(*rewards)))
        assert trajectory.reward == reward
        assert len(trajectory.completion.spans) == (2 * turns - 1 if turns > 1 else 0)


def test_an_evaluation_reward_is_not_discounted(tiny_folders: dict[str, Path]) -> None:
    config = _config("rollout.episode.type=multi_turn", "rollout.episode.turn_discount=0.5")
    chat = ChatFormat(load_tokenizer(str(tiny_folders["qwen2"])), config.data)
    sample = Sample((-1, 0), "eval", Item("?"), (5,))
    run = make_episode(config).run(sample, _Scripted(chat, ["a", "b"]), _Rewards(0.0, 0.7 + 0.2 + 0.1), chat)
    (trajectory,) = asyncio.run(run)
    assert trajectory.reward == pytest.approx(1.0)
    assert len(trajectory.completion.spans) == 3


def test_a_template_without_tool_results_is_refused_at_start() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ raise_exception('no tools') if m.role == 'tool' }}{% endfor %}"
    config = _config("rollout.episode.type=tool_use")
    ChatFormat(tokenizer, config.data)
    with pytest.raises(DataError, match=r"the model's template refuses the roles user, assistant, tool: no tools"):
        ChatFormat(tokenizer, config.data, tools=tool_schemas(config.rollout.episode))


def test_text_after_a_cut_turn_starts_with_the_missing_end_of_turn() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = CHAT_ML
    chat = ChatFormat(tokenizer, DataConfig())
    after = [chat.between([Message("user", "go on")], last_token=token) for token in (EOS, *tokenizer.encode("<"))]
    whole, cut = (str(tokenizer.decode(list(tokens))) for tokens in after)
    assert whole == "\n<|im_start|>user\ngo on<eos>\n<|im_start|>assistant\n"
    assert cut == "<eos>" + whole


class _Scripted(TurnEngine):
    """An engine that says what it is told to, each text followed by the end of a turn, but for those that end in ~."""

    def __init__(self, chat: ChatFormat, texts: list[str], *, max_new_tokens: int = 200_000) -> None:
        self._texts = texts
        self._num = max_new_tokens
        self._tokenizer = make_tiny_tokenizer()
        self.seen: list[str] = []

    @property
    def max_new_tokens(self) -> int:
        return self._num

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Completion:
        self.seen.append(str(self._tokenizer.decode(list(tokens), skip_special_tokens=False)))
        text = self._texts.pop(0)
        ids = [*self._tokenizer.encode(text), *([] if text.endswith("~") else [EOS])][:max_new_tokens]
        made = np.array(ids, np.int32)
        reason = "stop" if ids[-1] == EOS else "length"
        return Completion(made, np.full(len(ids), -1, np.float32), np.zeros(len(ids), np.int32), reason)  # type: ignore[arg-type]


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "17*23"}}</tool_call>'


def _tool_episode(texts: list[str], *overrides: str, template: str | None = None) -> tuple[Trajectory, _Scripted, str]:
    config = _config("rollout.episode.type=tool_use", *overrides)
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    chat = ChatFormat(tokenizer, config.data, tools=tool_schemas(config.rollout.episode))
    engine, rewards = _Scripted(chat, texts), _Rewards(1.0)
    item = Item("17*23=?\n")
    sample = Sample((1, 0), "train", item, chat.prompt(item))
    (trajectory,) = asyncio.run(make_episode(config).run(sample, engine, rewards, chat))
    return trajectory, engine, rewards.requests[0].completion


def test_the_next_turn_continues_after_the_tool_s_result() -> None:
    trajectory, engine, scored = _tool_episode([CALL, "#### 391"])
    assert engine.seen[0].startswith("You can call:\ncalculator(expression): Compute")
    assert engine.seen[0].endswith("</tool_call>\n17*23=?\n")
    assert engine.seen[1] == engine.seen[0] + CALL + "<eos>\n<tool_response>391</tool_response>\n"
    assert scored == "#### 391"  # what a tool said is no answer
    assert len(trajectory.completion.spans) == 3


def test_a_template_writes_the_end_of_turn_once() -> None:
    _, engine, _ = _tool_episode([CALL, "#### 391"], template=CHAT_ML)
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
        _, engine, _ = _tool_episode(
            [f"<tool_call>{call}</tool_call>", "x"], "rollout.episode.tools=[python]", "data.max_prompt_tokens=512"
        )
        assert f"<tool_response>{said}" in engine.seen[1]


def test_an_episode_ends_at_max_turns_and_runs_parallel_calls() -> None:
    trajectory, engine, _ = _tool_episode([CALL] * 3, "rollout.episode.max_turns=2")
    assert len(engine.seen) == 2
    assert len(trajectory.completion.spans) == 3  # nothing stands behind the policy's last word
    several = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>' * 2
    _, engine, _ = _tool_episode([several, "x"])
    assert engine.seen[1].endswith("<tool_response>2</tool_response>\n<tool_response>2</tool_response>\n")


def test_a_cut_turn_is_the_last_turn() -> None:
    """Its end of turn is missing, so nothing could be said to it."""
    config = _config("rollout.episode.type=multi_turn", "rollout.episode.max_turns=3")
    chat = ChatFormat(make_tiny_tokenizer(), config.data)
    engine = _Scripted(chat, ["a", "b~", "c"])  # as with max_turn_tokens: there is room for another
    sample = Sample((1, 0), "train", Item("?"), (5,))
    (trajectory,) = asyncio.run(make_episode(config).run(sample, engine, _Rewards(0.0), chat))
    assert len(engine.seen) == 2
    assert trajectory.completion.finish_reason == "length"
    cut, engine, _ = _tool_episode([CALL + "~", "y"])  # the call is whole, the turn is not
    assert len(engine.seen) == 1
    assert cut.completion.finish_reason == "length"


def test_turns_have_different_seeds_and_are_reproducible(
    tiny_folders: dict[str, Path],
) -> None:
    engine, config = _Watched(tiny_folders["qwen2"]), _config()

    async def drawn(number: int) -> list[list[int]]:
        submitter = Submitter(engine, context_tokens=256)
        sample = _engine_of(submitter, number, config)
        return [(await sample.generate((5, 6), max_new_tokens=12)).tokens.tolist() for _ in range(3)]

    async def scenario() -> list[list[list[int]]]:
        return [await drawn(number) for number in (1, 1, 2)]

    one, again, other = asyncio.run(scenario())
    engine.close()
    assert one == again != other
    assert len({tuple(tokens) for tokens in (*one, *other)}) == 6


def test_only_closed_calls_are_calls() -> None:
    assert tool_calls("a<tool_call> x </tool_call>b<tool_call>y</tool_call><tool_call>z") == ["x", "y"]
    assert tool_calls("</tool_call><tool_call>") == []


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=5), st.booleans())
def test_any_conversation_is_one_sequence_with_its_spans(turns: list[tuple[int, int]], ends: bool) -> None:
    conversation, expected, mask, number = Conversation((100, 101)), [100, 101], [], 0
    for index, (num_made, num_said) in enumerate(turns):
        made = list(range(number, number + num_made))
        versions = np.full(num_made, index, np.int32)
        completion = Completion(np.array(made, np.int32), np.full(num_made, -1, np.float32), versions, "stop")
        conversation.add(completion)
        mask += [True] * num_made
        expected += made
        number += num_made
        if index < len(turns) - 1 or ends:
            said = list(range(number, number + num_said))
            conversation.add_others(said)
            expected += said
            number += num_said
            mask += [False] * num_said
    assert list(conversation.tokens) == expected
    sample = Sample((4, 2), "train", Item("?"), (100, 101))
    trajectory = conversation.trajectory(sample, Scored(reward=1.0, parts={}, turn_rewards=tuple(range(len(turns)))))
    num = len(mask) - (turns[-1][1] if ends else 0)  # what stands behind the last turn is left out
    completion = trajectory.completion
    assert completion.tokens.tolist() == expected[2 : 2 + num]
    assert written_by_policy(completion.spans, num).tolist() == mask[:num]
    assert (completion.behaviour_logprobs != 0).tolist() == mask[:num]
    assert (np.diff(completion.versions) >= 0).all()
    assert trajectory.token_rewards is not None
    last_of_turns = [i for i in range(num) if mask[i] and (i == num - 1 or not mask[i + 1])]
    assert trajectory.token_rewards[last_of_turns].tolist() == list(range(len(turns)))
    assert trajectory.token_rewards.sum() == sum(range(len(turns)))


def test_token_rewards_must_match_the_number_of_tokens() -> None:
    conversation = Conversation((1,))
    arrays = (np.ones(2, np.int32), np.ones(2, np.float32), np.ones(2, np.int32))
    conversation.add(Completion(*arrays, "stop"))
    sample = Sample((4, 2), "train", Item("?"), (1,))
    with pytest.raises(
        EpisodeError, match="token_rewards: expected one number for each of the 2 completion tokens, got 3"
    ):
        conversation.trajectory(sample, Scored(reward=1.0, parts={}, token_rewards=(1, 2, 3)))
    with pytest.raises(EpisodeError, match="turn_rewards: expected one number for each of the 1 turns, got 2"):
        conversation.trajectory(sample, Scored(reward=1.0, parts={}, turn_rewards=(1, 2)))


def test_without_a_template_messages_become_plain_text() -> None:
    config = DataConfig(system_prompt="Add.")
    chat = ChatFormat(make_tiny_tokenizer(), config)
    item = Item((Message("user", "1+1=?\n"), Message("assistant", "#### 2"), Message("user", "1+2=?\n")))
    assert chat.text(chat.prompt(item)) == "Add.\n1+1=?\n#### 2\n\n1+2=?\n"


def test_cancelling_an_episode_aborts_its_requests(tiny_folders: dict[str, Path]) -> None:
    engine, config = _Watched(tiny_folders["qwen2"]), _config()

    async def scenario() -> None:
        submitter = Submitter(engine, context_tokens=256)
        sampling = SamplingParameters(max_new_tokens=200, seed=0)
        sample = SampleEngine(submitter=submitter, name="1/0", sampling=sampling, min_version=99)
        task = asyncio.create_task(sample.generate((5, 6)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    ((_, future),) = engine.asked
    assert future.result(timeout=120).finish_reason == "abort"
    engine.close()
    assert config.rollout.episode.type == "single_turn"


def test_an_error_after_an_abort_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    class _Engine:
        def __init__(self) -> None:
            self.futures: list[Future[Completion]] = []
            self.aborted: list[str] = []

        def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
            self.futures = [Future() for _ in requests]
            return self.futures

        def abort(self, request_ids: Sequence[str]) -> None:
            self.aborted += request_ids

    async def scenario() -> None:
        submitter = Submitter(engine, context_tokens=256)  # type: ignore[arg-type]
        sample = SampleEngine(submitter=submitter, name="1/0", sampling=SamplingParameters(max_new_tokens=2))
        task = asyncio.create_task(sample.generate((5, 6)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.futures.pop().set_exception(EngineError("gone"))  # raises if the abort cancelled this future
        await asyncio.sleep(0.01)

    engine = _Engine()
    asyncio.run(scenario())
    gc.collect()  # asyncio logs an error of a collected future
    assert engine.aborted == ["1/0/0"]
    assert caplog.messages == []
