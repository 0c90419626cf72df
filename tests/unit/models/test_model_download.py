"""A download from the hub takes a single copy of the weights, from a hub of this test, and then works offline."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors.torch import save_file
from support.families import family_config, save_family
from support.http_servers import serving
from transformers import Qwen2ForSequenceClassification

from areal_rloo.models.tiny import make_tiny_tokenizer

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_READ = """
import sys
from areal_rloo.config import load_config
from areal_rloo.models.files import load_tokenizer, policy_folder, stop_token_ids
from areal_rloo.models.loading import empty_policy
tokenizer = load_tokenizer("org/model")
empty_policy("org/model")
print(tokenizer.chat_template, stop_token_ids("org/model", tokenizer))
print(policy_folder("org/model", load_config("quickstart.yaml", sys.argv[1:])))
"""
_REWARD = """
from areal_rloo.rewards.model import RewardModel
RewardModel("org/model", key="reward", device="cpu", batch_size=2, deadline_s=9.0)
"""
_DOWNLOAD = "import sys; from areal_rloo.models.files import model_folder; print(model_folder(sys.argv[1]))"


@pytest.fixture
def asked() -> list[str]:
    """The requests to the hub so far."""
    return []


@pytest.fixture
def published(tmp_path: Path, asked: list[str]) -> Iterator[tuple[Path, str]]:
    """A folder of files, and the address of a hub that serves them as the model org/model."""
    folder = tmp_path / "published"
    folder.mkdir()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def _answer(self, *, body: bool) -> None:
            asked.append(self.path)
            name = self.path.partition("?")[0].rpartition(f"/resolve/{_COMMIT}/")[2]
            if "/tree/" in self.path:
                listed = [(path.name, path.stat().st_size) for path in folder.iterdir()]
                files = [{"type": "file", "path": name, "size": size, "oid": _COMMIT} for name, size in listed]
                content = json.dumps(files).encode()
            elif self.path.startswith("/api/models/org/model"):
                content = json.dumps({"id": "org/model", "sha": _COMMIT}).encode()
            elif (folder / name).is_file():
                content = (folder / name).read_bytes()
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    with serving(Hub) as address:
        yield folder, address


@pytest.mark.parametrize("max_shard_size", ["100KB", "1GB"])
def test_of_two_copies_of_the_weights_one_is_downloaded(
    published: tuple[Path, str], tmp_path: Path, max_shard_size: str
) -> None:
    folder, address = published
    save_family("mistral", tmp_path / "whole").save_pretrained(folder, max_shard_size=max_shard_size)
    expected = {path.name for path in folder.iterdir()}
    save_file({"layers.0.attention.wq.weight": torch.zeros(64, 64)}, folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    make_tiny_tokenizer().save_pretrained(folder)
    expected |= {"tokenizer.json", "tokenizer_config.json"}
    for offline in ("0", "1"):
        done = _run(_DOWNLOAD, address, tmp_path, "org/model", HF_HUB_OFFLINE=offline)
        assert done.returncode == 0, done.stderr
        assert {path.name for path in Path(done.stdout.strip()).iterdir()} == expected


def _run(program: str, address: str, tmp_path: Path, *arguments: str, **variables: str) -> CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)


def test_a_complete_model_is_read_without_asking_the_hub(
    published: tuple[Path, str], tmp_path: Path, asked: list[str]
) -> None:
    """A tokenizer with a template in a file of its own, and a model without a generation config."""
    folder, address = published
    save_family("qwen2", folder)
    (folder / "generation_config.json").unlink()
    make_tiny_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("a template")
    first = _run(_READ, address, tmp_path)
    assert first.returncode == 0, first.stderr
    assert "a template (1,)" in first.stdout
    assert asked
    asked.clear()
    again = _run(_READ, address, tmp_path)
    assert again.stdout == first.stdout, again.stderr
    assert asked == []


def test_a_complete_reward_model_is_read_without_asking_the_hub(
    published: tuple[Path, str], tmp_path: Path, asked: list[str]
) -> None:
    folder, address = published
    config = family_config("qwen2", num_labels=1)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    for _ in range(2):
        asked.clear()
        done = _run(_REWARD, address, tmp_path)
        assert done.returncode == 0, done.stderr
    assert asked == []


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("cohere2", ("rollout.engine=embedded",), "which the embedded engine does not serve"),
        ("mixtral", ("rollout.engine=sglang",), "take a model of one of the families tested with the learner"),
        ("phi3", ("rollout.engine=sglang",), "SGLang does not look"),
    ],
)
def test_a_wrong_model_is_refused_before_its_weights_are_downloaded(
    family: str, overrides: tuple[str, ...], words: str, published: tuple[Path, str], tmp_path: Path, asked: list[str]
) -> None:
    folder, address = published
    config = {"model_type": family, "rope_parameters": {"partial_rotary_factor": 0.75}}
    (folder / "config.json").write_text(json.dumps(config))
    make_tiny_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    program = "import sys; from areal_rloo.config import load_config; from areal_rloo.models.files import policy_folder"
    program += "; policy_folder('org/model', load_config('quickstart.yaml', sys.argv[1:]))"
    done = _run(program, address, tmp_path, *overrides)
    assert words in done.stderr
    assert any(path.endswith("/config.json") for path in asked)
    assert not any("safetensors" in path for path in asked)
