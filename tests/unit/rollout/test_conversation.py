"""A conversation: token ids, spans and token rewards of any sequence of turns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.algorithm.loss import written_by_policy
from areal_rloo.errors import EpisodeError
from areal_rloo.rewards.request import Scored
from areal_rloo.rollout.episode import Conversation, Sample
from areal_rloo.trajectory import Completion, Item


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
