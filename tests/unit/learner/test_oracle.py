"""Compare the synchronous oracle examples/one_file_rloo.py with the learner: same trajectories, same gradient."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support.one_rank import one_rank
from transformers import AutoModelForCausalLM

from areal_rloo.config import load_config
from areal_rloo.models.loading import load_policy
from areal_rloo.trajectory import Completion, Group, Trajectory

FILE = Path(__file__).resolve().parents[3] / "examples" / "one_file_rloo.py"
TEMPERATURE = 0.9


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_rloo", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_file_rloo"] = module
    spec.loader.exec_module(module)
    return module


def test_the_oracle_fits_one_page() -> None:
    assert FILE.read_text().count("\n") < 250


def test_oracle_and_learner_have_the_same_gradient(oracle: ModuleType, tiny_folders: dict[str, Path]) -> None:
    torch.manual_seed(0)
    folder = str(tiny_folders["qwen2"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    groups, sampled, advantages = [], [], []
    for group_id, prompt in enumerate(([5, 6, 7], [8, 9], [10, 11, 12, 13])):
        drawn = oracle.sample(model, prompt, num=4, eos=1, max_new_tokens=20, temperature=TEMPERATURE)
        own = [oracle.Sampled(prompt, *one, float(rng.integers(0, 2))) for one in drawn]
        sampled += own
        advantages += oracle.leave_one_out([one.reward for one in own])
        trajectories = tuple(
            Trajectory(group_id, index, np.array(prompt, np.int32), _completion(one), one.reward)
            for index, one in enumerate(own)
        )
        groups.append(Group(group_id, 1, trajectories))
    oracle.loss_of(oracle.logprobs_of(model, sampled, TEMPERATURE), sampled, advantages).backward()

    config = load_config(
        "quickstart.yaml",
        [
            f"rollout.sampling.temperature={TEMPERATURE}",
            "learner.num_minibatches=1",
            "learner.optimizer.max_grad_norm=1e9",
        ],
    )
    policy = load_policy(folder, device=torch.device("cpu"))
    step = one_rank(policy, config)
    result = step.step(groups, policy_version=0)
    assert result.updates.num_optimizer_steps == 1
    assert result.numbers["behaviour_weight_mean"] == pytest.approx(1.0, abs=1e-4)  # sampled with the trained weights
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert scale > 0
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=2e-6 * scale, msg=name)


def _completion(one: object) -> Completion:
    tokens = one.completion  # type: ignore[attr-defined]
    logprobs = one.behaviour_logprobs.numpy()  # type: ignore[attr-defined]
    reason = "stop" if tokens[-1] == 1 else "length"
    return Completion(np.array(tokens, np.int32), logprobs, np.zeros(len(tokens), np.int32), reason)  # type: ignore[arg-type]
