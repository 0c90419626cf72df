"""A key of AReaL, verl, TRL or ms-swift gives a hint with our key, or the reason why there is none."""

import re

import pytest

from areal_rloo.config import Config, load_config
from areal_rloo.config.other_names import ABSENT, OURS
from areal_rloo.config.typed import hints_of
from areal_rloo.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learner.optimizer.lr=1e-5", "did you mean 'learner.optimizer.learning_rate'?"),
        ("rollout.sampling.n=8", "did you mean 'algorithm.group_size'?"),
        ("algorithm.kl_coef=0.1", "did you mean 'algorithm.kl.coefficient'?"),
        ("learner.train_batch_size=8", "did you mean 'learner.groups_per_step'?"),
        ("learner.max_steps=8", "did you mean 'learner.num_train_steps'?"),
        ("learner.num_ppo_epochs=2", "did you mean 'learner.num_epochs_per_batch'?"),
        ("learner.gae_lambda=1", "there is no such option: there is no critic"),
        ("rloo_k=4", "did you mean 'algorithm.group_size'?"),
        ("response_length=64", "did you mean 'rollout.sampling.max_new_tokens'?"),
        ("sampling.n=8", "did you mean 'algorithm.group_size'?"),
        ("actor.optimizer.lr=1e-5", "did you mean 'learner.optimizer.learning_rate'?"),
        ("actor_rollout_ref.actor.clip_ratio=0.2", "did you mean 'algorithm.loss.eps_low'?"),
        ("model.tiny.warm_strat.max_steps=100", "did you mean 'model.tiny.warm_start'?"),
        ("actor_rollout_ref.rollout.val_kwargs.n=8", "a key of AReaL or verl; `areal-rloo migrate FILE`"),
        ("critic.optim.lr=1e-5", "there is no critic"),
        ("reward_model.model_path=org/m", "expected one of run, model, data"),
        ("actor.optimizer.eps=1e-5", "a key of AReaL or verl; `areal-rloo migrate FILE`"),
        ("gconfig={n_samples: 2, greedy: true}", "a key of AReaL or verl; `areal-rloo migrate FILE`"),
    ],
)
def test_a_name_of_another_system_gives_a_hint(override: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        load_config("quickstart.yaml", [override])


def test_every_hint_for_a_name_of_another_system_is_an_option() -> None:
    hints = hints_of(Config)
    assert [key for key in OURS.values() if key not in hints] == []
    assert {key for key in ABSENT if any(path.endswith(f".{key}") for path in hints)} == set()


def test_a_learning_rate_of_0_is_a_control_run() -> None:
    config = load_config("quickstart.yaml", ["learner.optimizer.learning_rate=0"])
    assert config.learner.optimizer.learning_rate == 0
