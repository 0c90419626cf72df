"""Models, data, functions, tools and SGLang's environment, each made to fail on real files."""

import contextlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.families import save_family
from support.situations import check_copies_here, config, downloaded, found, only

from areal_rloo.errors import ModelError
from areal_rloo.launcher import start
from areal_rloo.launcher.doctor import Situation
from areal_rloo.launcher.doctor.__main__ import main
from areal_rloo.launcher.doctor.inputs import (
    check_data_files,
    check_functions,
    check_loading,
    check_models,
    check_own_parts,
    check_server,
    check_server_imports,
    check_tool_sandbox,
    check_unlisted,
)
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.tasks.tools import landlock


def test_the_parameters_of_a_complete_model_are_counted(model: Path) -> None:
    assert only(check_models, "ok", f"model.path={model}").what == f"{model}: 12 parameters"


def test_a_family_must_be_trained_and_served(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "cohere2"}')
    finding = only(check_models, "wrong", f"model.path={model}")
    assert "is a cohere2 model, which the embedded engine does not serve; expected one of qwen2" in finding.what
    assert only(check_models, "ok", f"model.path={model}", "rollout.engine=sglang")
    (model / "config.json").write_text('{"model_type": "mixtral", "num_local_experts": 8}')
    finding = only(check_models, "wrong", f"model.path={model}", "rollout.engine=sglang")
    assert (
        "is a mixtral model with num_local_experts=8 in config.json, a mixture of experts; the learner" in finding.what
    )


@pytest.mark.parametrize(("family", "passes"), [("persimmon", True), ("stablelm", False)])
def test_an_unlisted_family_is_compared_before_the_start(
    family: str, passes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_copies_here(monkeypatch)
    save_family(family, tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    named = (f"model.path={tmp_path}", "rollout.engine=sglang", "rollout.sglang.urls=[http://127.0.0.1:9]")
    finding = only(check_unlisted, "ok" if passes else "wrong", *named)
    with contextlib.nullcontext() if passes else pytest.raises(ModelError, match="is a stablelm model, and the check"):
        start.check(config(*named))
    refusal = (
        f"model.path: {tmp_path} is a stablelm model, and the check whether the learner computes its logprobs fails"
    )
    assert passes or str(finding.error).startswith(refusal)
    main(["--config", "quickstart.yaml", "--quick", *named, f"run.folder={tmp_path / 'run'}"])
    said = [
        line for line in capsys.readouterr().out.splitlines() if "small copy" in line or "the check whether" in line
    ]
    assert [line.split()[0] for line in said] == ["ok" if passes else "wrong"], "the quick doctor makes this check, too"


def test_the_doctor_loads_names_and_shapes_as_the_learner_does(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    named = f"model.path={tmp_path}"
    assert only(check_loading, "ok", named).what.startswith(f"{tmp_path}: the files are those of the model")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    finding = only(check_loading, "wrong", named)
    assert finding.what == f"{tmp_path} has no weights for model.norm.weight"
    assert found(check_loading) == [], "the tiny model is made by ourselves"


def test_a_missing_shard_is_named(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    finding = only(check_models, "wrong", f"model.path={model}")
    assert "1 of its 2 files of weights are missing, the first is model-00002-of-00002.safetensors" in finding.what
    assert finding.fix == "download the model again"
    assert isinstance(finding.error, ModelError)


def test_a_truncated_file_is_named(model: Path) -> None:
    file = model / "model-00001-of-00002.safetensors"
    num_bytes = file.stat().st_size
    os.truncate(file, num_bytes - 1)
    finding = only(check_models, "wrong", f"model.path={model}")
    assert f"{num_bytes - 1} of {num_bytes} bytes are present" in finding.what


def test_a_pipe_or_a_device_in_place_of_a_config_is_wrong(model: Path) -> None:
    path = model / "config.json"
    path.unlink()
    for make in (os.mkfifo, lambda there: there.symlink_to("/dev/zero")):
        make(path)
        finding = only(check_models, "wrong", f"model.path={model}")
        assert "config.json cannot be read: [Errno 22] expected a regular file" in finding.what
        path.unlink()


@pytest.mark.parametrize("content", [b"", b"PK\3\4 a zip file", b"\x10\0\0\0\0\0\0\0{not json", b"\2\0\0\0\0\0\0\0[]"])
def test_a_file_of_the_wrong_kind_is_named(model: Path, content: bytes) -> None:
    (model / "model-00001-of-00002.safetensors").write_bytes(content)
    assert "model-00001-of-00002.safetensors is not whole" in only(check_models, "wrong", f"model.path={model}").what


def test_a_git_lfs_pointer_is_recognised(model: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n"
    (model / "model-00001-of-00002.safetensors").write_text(pointer)
    assert only(check_models, "wrong", f"model.path={model}").fix == "run git lfs pull in its folder"


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_reported(model: Path, index: str) -> None:
    (model / "model.safetensors.index.json").write_text(index)
    assert "index.json cannot be read" in only(check_models, "wrong", f"model.path={model}").what


def test_a_folder_without_weights_is_no_model(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "llama"}')
    assert "no model.safetensors in it" in only(check_models, "wrong", f"model.path={bare}").what
    checkpoint = tmp_path / "step-000001"
    checkpoint.mkdir()
    model.rename(checkpoint / "model")
    assert only(check_models, "wrong", f"model.path={checkpoint}").fix == f"its model is {checkpoint / 'model'}"
    assert "config.json cannot be read" in only(check_models, "wrong", f"model.path={bare / 'config.json'}").what


def test_only_the_policy_needs_a_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    states = [f.state for f in found(check_models, f"model.path={model}", f"model.reference.path={model}")]
    assert states == ["wrong", "ok"]


def test_a_model_missing_on_a_login_node_is_unsure() -> None:
    submitting = Situation(config("model.path=/nowhere/model"), runs_here=False)
    (finding,) = check_models(submitting)
    assert (finding.state, finding.what) == ("unsure", "/nowhere/model: not on this host")


_PHI3 = {"model_type": "phi3", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"model_type": "qwen2_moe"}, (), "is a qwen2_moe model"),
        (_PHI3, ("rollout.engine=sglang",), "SGLang does not look"),
        ({"model_type": "cohere2"}, (), "which the embedded engine does not serve"),
        ({"model_type": "qwen2"}, ("learner.lora.targets=[nowhere]",), "expected names of linear layers"),
        ({"model_type": "qwen2", "quantization_config": {"quant_method": "fp8"}}, (), "is quantized"),
    ],
)
def test_a_downloaded_model_is_refused_as_its_folder(
    config: dict[str, Any], options: tuple[str, ...], words: str, model: Path, tmp_path: Path
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    assert words in str(only(check_models, "wrong", f"model.path={model}", *options).error)
    snapshot, home = downloaded(model, tmp_path / "hf"), str(tmp_path / "hf")
    assert words in str(only(check_models, "wrong", "model.path=org/name", *options, HF_HOME=home).error)
    if "learner.lora.targets=[nowhere]" not in options:
        (snapshot / "model-00001-of-00002.safetensors").unlink()
        assert words in str(only(check_models, "wrong", "model.path=org/name", *options, HF_HOME=home).error)


def test_a_downloaded_reference_is_refused_too(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text('{"model_type": "qwen2_moe"}')
    downloaded(model, tmp_path / "hf")
    finding = only(check_models, "wrong", "model.reference.path=org/name", HF_HOME=str(tmp_path / "hf"))
    assert str(finding.error).startswith("model.reference.path: ")


def test_a_damaged_download_is_wrong(model: Path, tmp_path: Path) -> None:
    """The hub's client would not download the file again."""
    snapshot = downloaded(model, tmp_path / "hf")
    os.truncate(snapshot / "model-00001-of-00002.safetensors", 90)
    assert "is not whole" in only(check_models, "wrong", "model.path=org/name", HF_HOME=str(tmp_path / "hf")).what


def test_missing_data_and_functions_are_wrong(tmp_path: Path) -> None:
    finding = only(check_data_files, "wrong", "data.train.task=gsm8k", f"data.train.path={tmp_path}/no.jsonl")
    assert finding.what.endswith("no.jsonl: no such file")
    assert only(check_data_files, "ok").name == "data"
    finding = only(check_functions, "wrong", "algorithm.group_filter=no.py:keep")
    assert (finding.name, "no.py cannot be imported" in finding.what) == ("algorithm.group_filter", True)


def test_parts_of_the_algorithm_are_tried_in_a_process(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def loss(current_logprobs): return -current_logprobs\ndef same(rewards): return rewards * 0 - 1\n")
    options = (f"algorithm.loss.kind={path}:loss", f"algorithm.advantages={path}:same")
    assert [finding.name for finding in found(check_own_parts, *options)] == [
        "algorithm.loss.kind",
        "algorithm.advantages",
    ]
    finding = only(check_own_parts, "wrong", *options, f"algorithm.sample_weights={path}:same")
    assert finding.name == "algorithm.sample_weights"
    assert finding.what == f"{path}:same returned -1, expected numbers of at least 0 ({path}:2)"
    assert found(check_own_parts) == [], "no process without such a function"


def test_a_curriculum_is_tried_with_the_items(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def even(items): return [1] * len(items)\ndef no(items): return [item.fields['no'] for item in items]\n"
    )
    assert only(check_data_files, "ok", f"data.curriculum={path}:even").name == "data"
    finding = only(check_data_files, "wrong", f"data.curriculum={path}:no")
    assert (finding.name, "no raised KeyError: 'no'" in finding.what) == ("data.curriculum", True)


def test_a_group_filter_that_cannot_be_called_with_a_group_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Keep:\n    def __init__(self, group): pass\n"
        "async def later(group): return False\n"
        "def two(group, least): return True\n"
        "def keep(group, least=1): return True\n"
    )
    for name, what in (
        ("Keep", f"expected a function, but {path}:Keep is a class"),
        ("later", f"expected a function of one group, such as `def keep(group):`, but {path}:later is async"),
        ("two", f"but {path}:two cannot be called with it: missing a required argument: 'least'"),
    ):
        finding = only(check_functions, "wrong", f"algorithm.group_filter={path}:{name}")
        assert (finding.name, what in finding.what) == ("algorithm.group_filter", True)
    assert only(check_functions, "ok", f"algorithm.group_filter={path}:keep").name == "algorithm.group_filter"


def test_an_own_episode_that_cannot_be_made_or_run_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Base:\n"
        "    def __init__(self, config): self.share = 1 / config.rollout.num_workers / config.learner.num_ranks\n"
        "    async def run(self, sample, engine, rewards, chat): ...\n"
        "class Raises(Base):\n    def __init__(self, config): self.depth = {}['depth']\n"
        "class Two(Base):\n    def __init__(self, config, depth): ...\n"
        "class Other(Base):\n    async def run(self, sample): ...\n"
        "class Neither: ...\n"
    )
    for name, what in (
        ("Raises", f"{path}:Raises cannot be made from the config: KeyError: 'depth' ({path}:5)"),
        ("Two", f"{path}:Two cannot be made from the config: TypeError: Two.__init__() missing 1 required positional"),
        ("Other", f"expected {path}:Other.run(self, sample, engine, rewards, chat), but it cannot be called"),
        ("Neither", f"expected a class with an async method run(), got {path}:Neither"),
    ):
        finding = only(check_functions, "wrong", f"rollout.episode.type={path}:{name}")
        assert (finding.name, finding.what.startswith(what)) == ("rollout.episode.type", True), finding.what
    counts = ("rollout.num_workers=auto", "learner.num_ranks=auto")
    assert only(check_functions, "ok", f"rollout.episode.type={path}:Base", *counts).name == "rollout.episode.type"


def test_an_agent_with_arguments_that_nothing_fills_is_wrong(tmp_path: Path) -> None:
    path, rows = tmp_path / "mine.py", tmp_path / "a.jsonl"
    path.write_text(
        "async def rows(base_url, api_key, question, level=0): ...\n"
        "def misspelt(base_url, api_key, promt): ...\n"
        "def placed(base_url, api_key, /): ...\n"
        "def rest(question, *, base_url, **rest): ...\n"
    )
    rows.write_text('{"question": "q", "answer": "#### 1"}\n')
    of_rows = (f"data.train={{task: gsm8k, path: {rows}}}", "data.eval=null")
    agent = ("rollout.episode.type=agent", f"rollout.episode.agent={path}")
    for name, data, argument in (
        ("misspelt", (), "promt"),
        ("misspelt", of_rows, "promt"),
        ("rows", (), "question"),
        ("rest", (), "question"),
        ("placed", (), "base_url"),
    ):
        finding = only(check_data_files, "wrong", *data, agent[0], f"{agent[1]}:{name}")
        what = f"{path}:{name}: there is no value for its argument '{argument}'"
        assert (finding.name, finding.what.startswith(what)) == ("rollout.episode.agent", True), finding.what
    for name in ("rows", "rest"):
        assert only(check_data_files, "ok", *of_rows, agent[0], f"{agent[1]}:{name}").name == "data"


def test_a_sandbox_that_could_read_the_run_folder_is_wrong() -> None:
    tools = ("rollout.episode.type=tool_use", "rollout.episode.tools=[python]")
    (finding,) = found(check_tool_sandbox, *tools, folder=Path(sysconfig.get_paths()["purelib"]) / "runs")
    assert finding.state == "wrong"
    assert found(check_tool_sandbox) == []


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("{task: code, path: a}", "data.train"),
        ("{task: rows, path: a, rewards: [{task: code}]}", "data.train.rewards.0"),
    ],
)
def test_a_code_task_needs_a_sandbox_and_time(source: str, key: str) -> None:
    train = f"data.train={source}"
    (finding,) = found(check_tool_sandbox, train, folder=Path(sysconfig.get_paths()["purelib"]) / "runs")
    assert (finding.name, finding.state) == ("sandbox", "wrong")
    finding = only(check_tool_sandbox, "wrong", train, "rollout.reward_timeout_s=24")
    assert finding.what.startswith(f"24 s, but the programs of a completion at {key} may take 24 s")


def test_a_code_task_on_a_kernel_without_landlock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "CREATE_RULESET", 4000)
    finding = only(check_tool_sandbox, "wrong", "data.train={task: code, path: a}")
    assert "(tool 'python', task 'code') needs Landlock for its sandbox" in finding.what
    assert finding.fix.startswith("run on Linux 5.13")


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_a_missing_or_broken_server_is_wrong(name: str, tmp_path: Path) -> None:
    server = (f"rollout.engine={name}", f"rollout.{name}.python={sys.executable}")
    assert f"{sys.executable} has no {name}" in only(check_server, "wrong", *server).what
    broken = tmp_path / "python"
    broken.write_text(
        "#!/bin/sh\ncase \"$2\" in *importlib*) exit 0;; esac\necho 'ImportError: no libnuma' >&2; exit 1\n"
    )
    broken.chmod(0o755)
    server = (f"rollout.engine={name}", f"rollout.{name}.python={broken}")
    assert only(check_server, "ok", *server)
    assert only(check_server_imports, "wrong", *server).what.endswith("ImportError: no libnuma")
    broken.write_text("#!/bin/sh\nkill -KILL $$\n")
    assert only(check_server, "unsure", *server).what.startswith(f"{broken} was killed by signal 9")
    broken.write_text(f"#!/bin/sh\necho '{name} 0.1 with torch 2'\n")
    assert only(check_server_imports, "unsure", *server).what.startswith(f"{name} 0.1 with torch 2; tested is ")
