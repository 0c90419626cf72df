"""A checkpoint on a host whose memory has no room for a copy of the states: written at once, without the copy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.checkpoints import save, trained

from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.learner.parallel import files

TESTS = Path(__file__).resolve().parents[2]  # a program that starts there finds support/


@pytest.mark.parametrize("override", ["model.dtype=float32", "model.dtype=bfloat16", "learner.offload=optimizer"])
def test_a_checkpoint_without_room_for_a_copy_has_the_same_content(
    tmp_path: Path, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    folder = tiny_folders["qwen2"]
    assert save(Checkpoints(tmp_path / "copied"), folder, 3, override)
    monkeypatch.setattr(files, "memory", lambda: (0, 0))
    assert save(Checkpoints(tmp_path / "live"), folder, 3, override)
    copied, live = (
        json.loads((tmp_path / name / "step-000003" / "checksums.json").read_text()) for name in ("copied", "live")
    )
    assert copied.keys() == live.keys()
    different = {name for name in copied if copied[name] != live[name]}
    assert different <= {"state.msgpack"}, "the histories have random names"


def test_training_waits_for_a_write_without_a_copy(
    tmp_path: Path, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The states change after `save_shards` and `save` have returned: both files are of the time before."""
    monkeypatch.setattr(files, "memory", lambda: (0, 0))
    (tmp_path / "shards").mkdir()
    team = trained(tiny_folders["qwen2"])
    assert team.save_shards(tmp_path / "shards").done()
    assert (tmp_path / "shards" / "rank-0-of-1.safetensors").is_file()
    _, are_live = team.weights_to_write()
    assert are_live
    assert "copies for the checkpoint need" in caplog.text


def test_tensors_of_a_gpu_are_always_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "memory", lambda: (0, 0))
    assert files.has_room([torch.empty(5, device="meta")])
    assert not files.has_room([torch.empty(5)])


def test_ranks_of_a_host_do_not_each_take_the_last_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "memory", lambda: (0, 3000))
    assert files.has_room([torch.empty(500)])
    assert not files.has_room([torch.empty(500)], num_copies=2)


_PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from support.checkpoints import checkpoint_state, trained
from transformers import LlamaConfig, LlamaForCausalLM
from areal_rloo.config import load_config
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.learner.parallel import files
from areal_rloo.models.files import load_tokenizer

torch.set_num_threads(1)
made, tiny, room = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 258}
LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)).save_pretrained(made / "model")
team, tokenizer, config = trained(made / "model"), load_tokenizer(str(tiny)), load_config("quickstart.yaml")
states = sum(tensor.nbytes for tensor in team.own.state().values())
files.memory = lambda: (room, room)

def kibibytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])

checkpoints = Checkpoints(made / "checkpoints")
Path("/proc/self/clear_refs").write_text("5")  # reset the recorded peak
before = kibibytes("VmRSS")
checkpoints.save(checkpoint_state(3), config, team, tokenizer)
assert checkpoints.wait()
print((kibibytes("VmHWM") - before) * 1024 / states)
"""


@pytest.mark.parametrize(("room", "least", "most"), [(0, -0.05, 0.2), (2**50, 0.8, 1.6)])
def test_the_peak_of_memory_is_that_of_the_states(
    tmp_path: Path, tiny_folders: dict[str, Path], room: int, least: float, most: float
) -> None:
    """Give the memory beyond that before, as a share of the states: a copy is more than the states."""
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path), str(tiny_folders["llama"]), str(room)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert least < float(done.stdout.splitlines()[-1]) < most
