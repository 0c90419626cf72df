"""An episode of your own: the policy may look at a problem again, and is told whether it was too high or too low.

    python -m areal_rloo.launcher.local --config quickstart.yaml learner.num_train_steps=20 \\
        rollout.episode.type=examples/multi_turn.py:Hints rollout.episode.max_turns=3 \\
        rollout.sampling.max_new_tokens=200

The episode that comes with the package says the same words every time (`rollout.episode.type=multi_turn`). What others
say is never trained on; the ids that go to the engine for the next turn are those that it gave for the last one.
"""

from collections.abc import Sequence

import msgspec

from areal_rloo.config import Config
from areal_rloo.rewards.answers import extract_answer
from areal_rloo.rollout.episode import Conversation, Rewards, Sample, TurnEngine
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Message, Trajectory


class Hints:
    """One object serves all samples of a worker, many at a time: it keeps nothing between them."""

    def __init__(self, config: Config) -> None:
        self._max_turns = config.rollout.episode.max_turns

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        """One sample of a group: as many turns as it takes. In training its reward is halved with every turn."""
        conversation = Conversation(sample.prompt_tokens)
        for turn in range(self._max_turns):
            await conversation.take_turn(engine)
            request = conversation.request(sample, chat)
            scored = await rewards.score(request)  # the reward of the data source, for what the last turn says
            if scored.reward == 1 or turn + 1 == self._max_turns or conversation.last.finish_reason != "stop":
                break
            hint = Message("user", f"{_hint(request.completion, sample.item.answer)}\n{sample.item.text}")
            said = chat.between([hint], last_token=int(conversation.last.tokens[-1]))
            if not conversation.reply(said, engine):
                break
        # Several trajectories may be given, all with the sample's reward: sub-agents, branches, rewritten histories.
        discount = 0.5**turn if sample.purpose == "train" else 1.0
        return [conversation.trajectory(sample, msgspec.structs.replace(scored, reward=scored.reward * discount))]


def _hint(completion: str, answer: str) -> str:
    given, right = extract_answer(completion), extract_answer(answer)
    if given is None or right is None:
        return "no answer"
    return "too high" if given > right else "too low"
