"""Model folders that would run code when loaded: pickled weights, code beside the weights, adapters of other models."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_rloo.config import ServerConfig
from areal_rloo.engines.embedded.parameters import load_checkpoint
from areal_rloo.engines.kinds import kind_of
from areal_rloo.engines.server.engine import ServerEngine
from areal_rloo.engines.server.process import ServerPlan
from areal_rloo.errors import ModelError
from areal_rloo.models.files import load_tokenizer, stop_token_ids
from areal_rloo.models.folder import check_weights
from areal_rloo.models.loading import empty_policy, load_policy
from areal_rloo.rewards.model import RewardModel

CPU = torch.device("cpu")


class Payload:
    """Makes a folder when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def _server(engine: Literal["sglang", "vllm"], folder: Path) -> None:
    plan = ServerPlan(folder, "cpu", "float32", tensor_parallel=1, num_slots=1, context_tokens=8, num_threads=1)
    ServerEngine(kind_of(engine), plan, config=ServerConfig(), url=None, update_timeout_s=1.0, log=folder / "log")


LOADERS: dict[str, Callable[[Path], object]] = {
    "launcher": lambda folder: check_weights("model.path", folder),
    "learner": lambda folder: load_policy(str(folder), device=CPU),
    "embedded": lambda folder: load_checkpoint(folder, context_tokens=8, device=CPU, dtype=torch.float32),
    "sglang": partial(_server, "sglang"),
    "vllm": partial(_server, "vllm"),
    "reward": lambda folder: RewardModel(str(folder), key="model.path", device="cpu", batch_size=1, deadline_s=60.0),
}


@pytest.fixture
def folder(tiny_folders: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folders["qwen2"], tmp_path / "model")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
@pytest.mark.parametrize("loader", LOADERS)
def test_pickled_weights_are_refused_and_run_no_code(
    folder: Path, loader: str, dump: Callable[..., None], name: str
) -> None:
    (folder / "model.safetensors").unlink()
    with (folder / name).open("wb") as file:
        dump(Payload(folder / "marker"), file)
    with pytest.raises(ModelError, match=f"{name} is a pickle, which can run code.*convert the model") as raised:
        LOADERS[loader](folder)
    assert "\n" not in str(raised.value)
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("loader", LOADERS)
def test_an_adapter_is_refused_and_its_base_model_is_not_loaded(folder: Path, loader: str) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "other/model"}))
    with pytest.raises(ModelError, match="merge the adapter into its base model"):
        LOADERS[loader](folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_a_damaged_file_of_a_model_is_one_line(folder: Path, name: str) -> None:
    """Some damage leaves a model that loads; anything else is a ModelError."""
    whole, chance = (folder / name).read_bytes(), random.Random(name)
    damages = [b"", b"[]", b"5", b"null", b"[" * 50_000, b"\xff\xfe", b'{"a": NaN}', whole[: len(whole) // 2]]
    for _ in range(15):
        content = bytearray(whole)
        content[chance.randrange(min(len(whole), 2000))] ^= 1 << chance.randrange(8)
        damages.append(bytes(content))
    loaders: list[Callable[[], object]] = [
        lambda: stop_token_ids(str(folder), load_tokenizer(str(folder))),
        *(partial(LOADERS[loader], folder) for loader in ("learner", "embedded")),
    ]
    for damage in damages:
        (folder / name).write_bytes(damage)
        for load in loaders:
            try:
                load()
            except ModelError as error:
                assert "\n" not in str(error)


def test_weights_that_lack_a_parameter_are_refused(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no weights for model\.norm\.weight, which would be random"):
        load_policy(str(folder), device=CPU)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_beside_the_weights_is_not_run(folder: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")  # transformers asks on the terminal
    settings = json.loads((folder / file).read_text())
    settings["auto_map"] = {
        "AutoConfig": "hostile.Config",
        "AutoModelForCausalLM": "hostile.Model",
        "AutoTokenizer": ["hostile.Tokenizer", None],
    }
    settings |= {"model_type": "hostile"} if file == "config.json" else {"tokenizer_class": "Hostile"}
    (folder / file).write_text(json.dumps(settings))
    (folder / "hostile.py").write_text(f"import os\nos.mkdir({str(folder / 'marker')!r})\n")
    loaders: list[Callable[[], object]] = [
        lambda: load_policy(str(folder), device=CPU),
        lambda: empty_policy(str(folder)),
        lambda: load_tokenizer(str(folder)),
        lambda: LOADERS["embedded"](folder),
        lambda: LOADERS["reward"](folder),
    ]
    for load in loaders:
        try:
            load()
        except ModelError as error:
            assert "\n" not in str(error)
        assert not (folder / "marker").exists()
