"""docs/sft.md matches the code: configs load, commands parse, and the algorithm of on-policy distillation is that."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.documents import BLOCK

from areal_rloo.config import Config, load_config
from areal_rloo.learner.advantages import Samples, compute_advantages, loss_masks
from areal_rloo.program import Parser
from areal_rloo.stages.begin import parse
from areal_rloo.trajectory import Completion, Trajectory

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "sft.md").read_text(encoding="utf-8")
BLOCKS = BLOCK.findall(TEXT)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


def _config(block: str, tmp_path: Path) -> Config:
    path = tmp_path / "my.yaml"
    path.write_text(block)
    return load_config(str(path))


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "yaml"])
def test_the_configs_load(block: str, tmp_path: Path) -> None:
    assert _config(block, tmp_path).data.train_sources


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_parse(command: str) -> None:
    _, program, *words = shlex.split(command)
    parser: Any = Parser(prog=program, overrides=True)
    if program == "offline":
        parser.add_argument("samples")
    if program in ("sft", "offline"):
        _, config = parse(parser, words)
    else:
        config = load_config(words[words.index("--config") + 1], [word for word in words if "=" in word])
    assert config.data.train_sources


def test_on_policy_distillation_has_the_advantage_of_the_reverse_kl(tmp_path: Path) -> None:
    """The advantage of a token is the sum of log teacher - log student from the token on; rewards have no effect."""
    (block,) = (text for kind, text in BLOCKS if kind == "yaml" and "reference" in text)
    config = _config(block, tmp_path)
    behaviour, teacher = np.array([-1.0, -0.5, -2.0], np.float32), torch.tensor([-0.25, -1.5, -1.0])
    completion = Completion(np.array([5, 6, 1], np.int32), behaviour, np.zeros(3, np.int32), "stop")
    samples = Samples(
        [Trajectory(0, index, np.array([3], np.int32), completion, reward) for index, reward in ((0, 1.0), (1, 0.0))]
    )
    advantages = compute_advantages(
        samples,
        loss_masks(samples, policy_version=0, config=config.algorithm),
        [teacher, teacher],
        config=config,
        kl_coefficient=config.algorithm.kl.coefficient,
        stop_token_ids=frozenset([1]),
    )
    own = teacher.numpy() - behaviour
    expected = [sum(own[t:]) for t in range(3)]
    for of_tokens in advantages.of_tokens:
        np.testing.assert_allclose(of_tokens.numpy(), expected, rtol=1e-6)
