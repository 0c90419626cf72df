r"""Define your own episode: the policy may try again, after a hint whether the answer was too high or too low.

    python -m areal_rloo.launcher.local --config quickstart.yaml learner.num_train_steps=20 \
        rollout.episode.type=examples/multi_turn.py:Hints rollout.episode.max_turns=3 \
        rollout.sampling.max_new_tokens=200

The built-in episode `rollout.episode.type=multi_turn` repeats a fixed feedback. Hints are never trained on. The next
request to the engine continues with the token ids of the last turn; no text is tokenized twice.
"""

from collections.abc import Sequence

import msgspec

from areal_rloo.config import Config
from areal_rloo.rollout.episode import Conversation, Rewards, Sample, TurnEngine
from areal_rloo.tasks.answers import extract_answer
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Message, Trajectory


class Hints:
    """An episode class. A single object serves all concurrent samples of a worker, so it keeps no state of a sample."""

    def __init__(self, config: Config) -> None:
        self._max_turns = config.rollout.episode.max_turns

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        """Generate a sample of a group in several turns. In training, every further turn halves the reward."""
        conversation = Conversation(sample.prompt_tokens)
        for turn in range(self._max_turns):
            await conversation.take_turn(engine)
            request = conversation.request(sample, chat)
            scored = await rewards.score(request)  # the reward of the data source, for the last turn
            if scored.reward == 1 or turn + 1 == self._max_turns or conversation.last.finish_reason != "stop":
                break
            hint = Message("user", f"{_hint(request.completion, sample.item.answer)}\n{sample.item.text}")
            said = chat.between([hint], last_token=int(conversation.last.tokens[-1]))
            if not conversation.reply(said, engine):
                break
        # An episode may return several trajectories, all with the sample's reward: sub-agents, branches, new histories.
        discount = 0.5**turn if sample.purpose == "train" else 1.0
        return [conversation.trajectory(sample, msgspec.structs.replace(scored, reward=scored.reward * discount))]


def _hint(completion: str, answer: str) -> str:
    given, right = extract_answer(completion), extract_answer(answer)
    if given is None or right is None:
        return "no answer"
    return "too high" if given > right else "too low"
