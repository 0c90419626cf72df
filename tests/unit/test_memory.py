"""What a step needs of memory: the estimate against what torch keeps, and what is said when there is not enough."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_rloo.config import Config, load_config
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.memory import activation_bytes, estimate
from areal_rloo.learner.packing import Row, pack
from areal_rloo.models.logprobs import TokenLogprobs
from areal_rloo.trajectory import Completion, Group, Trajectory

CPU = torch.device("cpu")
REPO = Path(__file__).resolve().parents[2]


def _trajectory(num_tokens: int, index: int = 0) -> Trajectory:
    rng = np.random.default_rng(index)
    num = num_tokens - 1
    completion = Completion(
        rng.integers(2, 200, num).astype(np.int32),
        np.full(num, -5, np.float32),
        np.zeros(num, np.int32),
        "stop",
    )
    return Trajectory(0, index, np.array([3], np.int32), completion, float(index % 2))


def long_group(num_tokens: int) -> Group:
    return Group(0, 1, tuple(_trajectory(num_tokens, index) for index in range(2)))


def _kept_bytes(folder: Path, config: Config, num_tokens: int) -> int:
    """Of all that autograd keeps for the backward pass of one row, each storage once, without the weights."""
    policy = build_rank(config, model_path=str(folder), device=CPU).policy
    ((microbatch,),) = pack([_trajectory(num_tokens + 1)], max_tokens=num_tokens).microbatches
    row = Row.of(microbatch, CPU)
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, int] = {}

    def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def loss(given: TokenLogprobs, part: slice) -> torch.Tensor:
        return given.logprobs.sum()

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        total, *_ = policy(row.input_ids, row.layout, row.predicts, row.targets, token_loss=loss)
    assert total.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen2", "float32"), ("qwen3", "float32"), ("llama", "float32"), ("llama", "bfloat16")]
)
def test_the_estimate_of_activations_is_what_autograd_keeps(
    tiny_folders: dict[str, Path], name: str, dtype: str
) -> None:
    config = load_config("quickstart.yaml", [f"model.dtype={dtype}"])
    few, many = (_kept_bytes(tiny_folders[name], config, num) for num in (512, 1536))
    model = build_rank(config, model_path=str(tiny_folders[name]), device=CPU).policy.causal.config
    assert activation_bytes(model, config) == pytest.approx((many - few) / 1024, rel=0.25)


def test_every_way_to_need_less_memory_is_in_the_estimate(tiny_folders: dict[str, Path]) -> None:
    model = build_rank(load_config("quickstart.yaml"), model_path=str(tiny_folders["llama"]), device=CPU)
    dimensions = model.policy.causal.config

    def of(*overrides: str) -> float:
        config = load_config("quickstart.yaml", overrides)
        return sum(estimate(dimensions, config, num_parameters=10**9, num_trained=10**9).values())

    for override in (
        "learner.microbatch_tokens=1024",
        "learner.gradient_checkpointing=true",
        "learner.num_ranks=2",
        "learner.offload=optimizer",
        "learner.offload=parameters",
        "learner.optimizer.state_dtype=bfloat16",
    ):
        assert of(override) < of(), override
    rows = "learner.microbatch_tokens=4194304"  # with short ones, the second copy of the weights is more than they save
    assert of(rows, "model.dtype=bfloat16") < of(rows)
    assert of("algorithm.kl.coefficient=0.1") > of()
    assert of("algorithm.kl.coefficient=0.1", "model.reference.offload=true") == of()


def test_running_out_of_memory_names_the_estimate_and_what_to_lower(tiny_folders: dict[str, Path]) -> None:
    code = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from areal_rloo.config import load_config\n"
        "from areal_rloo.errors import UserError\n"
        "from tests.one_rank import one_rank\n"
        "from tests.unit.test_memory import long_group\n"
        "torch.set_num_threads(1)\n"
        "config = load_config('quickstart.yaml', ['learner.microbatch_tokens=100000', 'data.max_prompt_tokens=1'])\n"
        "step, groups = one_rank(Path(sys.argv[1]), config), [long_group(20_000)]\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))\n"
        "try:\n    step.step(groups, policy_version=0)\n"
        "except UserError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tiny_folders["llama"])]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("out of memory: a step with learner.microbatch_tokens=100000 needs about ")
    assert "lower learner.microbatch_tokens=100000, set learner.gradient_checkpointing=true" in ended.stdout
