"""Episodes of several turns: trained on the generated ids alone, and ended by the verifier or a limit."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.episodes import CHAT_ML, RewardsByTurn, ScriptedTurns, engine_of, episode_config, watched_engine

from areal_rloo.algorithm.loss import written_by_policy
from areal_rloo.models.files import load_tokenizer
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.rollout.episode import Sample, Submitter
from areal_rloo.rollout.episode_types import make_episode
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Item, Trajectory


@pytest.mark.parametrize("template", [None, CHAT_ML])
def test_several_turns_train_on_exactly_the_generated_ids(folder: Path, template: str | None) -> None:
    config = episode_config(
        "rollout.episode.type=multi_turn", "rollout.episode.max_turns=3", "rollout.episode.feedback=no!"
    )
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template
    chat, episode, rewards = ChatFormat(tokenizer, config.data), make_episode(config), RewardsByTurn(0.0)
    item = Item("1+2=?\n")

    async def scenario() -> list[Sequence[Trajectory]]:
        submitter = Submitter(engine, context_tokens=256)
        samples = [Sample((number, 0), "train", item, chat.prompt(item)) for number in range(24)]
        return list(
            await asyncio.gather(
                *(episode.run(s, engine_of(submitter, s.sample_id[0], config), rewards, chat) for s in samples)
            )
        )

    engine = watched_engine(folder)
    given_back = asyncio.run(scenario())
    engine.close()
    several = 0
    for number, (trajectory,) in enumerate(given_back):
        asked = [(r, f.result()) for r, f in engine.calls if r.request_id.startswith(f"{number}/0/")]
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
    assert len({request.request_id for request, _ in engine.calls}) == len(engine.calls)


def test_a_satisfied_verifier_ends_the_turns_and_earlier_turns_discount(folder: Path) -> None:
    config = episode_config(
        "rollout.episode.type=multi_turn", "rollout.episode.max_turns=4", "rollout.episode.turn_discount=0.5"
    )
    chat = ChatFormat(load_tokenizer(str(folder)), config.data)

    async def outcome(rewards: RewardsByTurn) -> Trajectory:
        sample = Sample((1, 0), "train", Item("?"), (5,))
        (trajectory,) = await make_episode(config).run(sample, ScriptedTurns(["a", "b", "c", "d", "e"]), rewards, chat)
        return trajectory

    for rewards, turns, reward in (((1.0,), 1, 1.0), ((0.0, 1.0), 2, 0.5), ((0.0, 0.0, 0.0, 0.5), 4, 0.0625)):
        trajectory = asyncio.run(outcome(RewardsByTurn(*rewards)))
        assert trajectory.reward == reward
        assert len(trajectory.completion.spans) == (2 * turns - 1 if turns > 1 else 0)


def test_an_evaluation_reward_is_not_discounted(folder: Path) -> None:
    config = episode_config("rollout.episode.type=multi_turn", "rollout.episode.turn_discount=0.5")
    chat = ChatFormat(load_tokenizer(str(folder)), config.data)
    sample = Sample((-1, 0), "eval", Item("?"), (5,))
    run = make_episode(config).run(sample, ScriptedTurns(["a", "b"]), RewardsByTurn(0.0, 0.7 + 0.2 + 0.1), chat)
    (trajectory,) = asyncio.run(run)
    assert trajectory.reward == pytest.approx(1.0)
    assert len(trajectory.completion.spans) == 3


def test_a_cut_turn_is_the_last_turn() -> None:
    """The cut turn has no end of turn, so no other turn can follow."""
    config = episode_config("rollout.episode.type=multi_turn", "rollout.episode.max_turns=3")
    chat = ChatFormat(make_tiny_tokenizer(), config.data)
    engine = ScriptedTurns(["a", "b~", "c"])  # as with max_turn_tokens: there is room for another
    sample = Sample((1, 0), "train", Item("?"), (5,))
    (trajectory,) = asyncio.run(make_episode(config).run(sample, engine, RewardsByTurn(0.0), chat))
    assert len(engine.seen) == 2
    assert trajectory.completion.finish_reason == "length"
