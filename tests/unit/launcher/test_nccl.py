"""Two versions of NCCL: learner and server in environments of their own, which are real Pythons with made metadata."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nvml import play_driver
from support.situations import found, only

from areal_rloo.config import Config, load_config
from areal_rloo.errors import PreflightError, WeightsError
from areal_rloo.launcher import start
from areal_rloo.launcher.doctor.devices import check_nccl
from areal_rloo.launcher.nccl import pair_of, with_transport
from areal_rloo.launcher.placement import Host
from areal_rloo.learner.memory import GIB
from areal_rloo.weights import collective
from areal_rloo.weights.manifest import build_manifest

Environments = Callable[..., str]

REAL_PYTHON = sys.executable


def _python(folder: Path, *packages: str) -> str:
    """Make a Python that has these packages alone, by name==version."""
    for package in packages:
        name, _, version = package.partition("==")
        metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{REAL_PYTHON}" -S "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environments:
    """Make the Python of the learner, and return the option that names the one of the server."""

    def make(here: str | None, there: str | None) -> str:
        packages = [
            () if version is None else (f"nvidia-nccl-cu13=={version}", f"torch==2.1{version[3]}.0+cu130")
            for version in (here, there)
        ]
        ours = _python(tmp_path / "ours", "areal-rloo==0.1.0", *packages[0])
        theirs = _python(tmp_path / "theirs", "sglang==0.5.23", *packages[1])
        monkeypatch.setattr(sys, "executable", ours)
        return f"rollout.sglang.python={theirs}"

    return make


def _config(*overrides: str) -> Config:
    gpus = ("learner.device=cuda", "rollout.device=cuda", "rollout.share_devices=never")
    return load_config("gsm8k_rloo.yaml", ["rollout.engine=sglang", *gpus, *overrides])


def _hosts(num: int = 1, gpus: int = 4) -> list[Host]:
    ids = tuple(map(str, range(gpus)))
    return [Host(f"n{index}", "10.0.0.1", 32, ids, 512 * GIB, 80 * 10**9) for index in range(num)]


def test_two_versions_on_a_host_send_weights_through_files(
    environments: Environments, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(environments("2.29.7", "2.30.7"))
    assert config.weights_transport(same_host=True) == "collective"
    placed, _ = start.placed(config, _hosts())
    assert placed.weights_transport(same_host=True) == "shared_memory"
    (line,) = capsys.readouterr().err.splitlines()
    assert "a group of NCCL 2.29.7 (torch 2.19.0, here) and NCCL 2.30.7 (torch 2.10.0 of " in line
    assert line.endswith(f"go through files; to use NCCL: {sys.executable} -m pip install {_wanted()}")


def _wanted() -> str:
    return "'torch==2.10.0' 'nvidia-nccl-cu13==2.30.7'"


@pytest.mark.parametrize(
    ("num_hosts", "transport", "ends"),
    [(1, "collective", ", or set weights.transport=shared_memory"), (2, "auto", ""), (2, "collective", "")],
)
def test_two_versions_without_another_transport_are_refused(
    environments: Environments, num_hosts: int, transport: str, ends: str
) -> None:
    config = _config(environments("2.29.7", "2.30.7"), f"weights.transport={transport}")
    with pytest.raises(PreflightError) as refused:
        with_transport(config, _hosts(num_hosts))
    words = str(refused.value)
    assert words.startswith("weights.transport: a group of NCCL 2.29.7 (torch 2.19.0, here) and NCCL 2.30.7 (torch ")
    assert words.endswith(f"does not form; {sys.executable} -m pip install {_wanted()}{ends}")
    assert "\n" not in words


@pytest.mark.parametrize(("here", "there"), [("2.30.7", "2.30.7"), (None, "2.30.7"), ("2.30.7", None), (None, None)])
def test_equal_and_unknown_versions_keep_the_transport(
    environments: Environments, here: str | None, there: str | None
) -> None:
    config = _config(environments(here, there))
    assert with_transport(config, _hosts()) == (config, "")
    pair = pair_of(config, _hosts(), same_host=True)
    assert pair is not None
    assert (pair.here and pair.here.version, pair.there and pair.there.version) == (here, there)


def test_two_packages_of_nccl_in_an_environment_are_unknown(environments: Environments, tmp_path: Path) -> None:
    config = _config(environments("2.29.7", "2.30.7"))
    _python(tmp_path / "theirs", "nvidia-nccl-cu12==2.29.7")
    pair = pair_of(config, _hosts(), same_host=True)
    assert pair is not None
    assert (pair.there, pair.differs) == (None, False)


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (("learner.device=cpu",), 4),
        (("rollout.device=cpu",), 4),
        (("learner.device=auto", "rollout.device=auto"), 0),
        (("rollout.engine=embedded",), 4),
        (("rollout.share_devices=side_by_side",), 4),
        (("weights.transport=shared_memory",), 4),
    ],
)
def test_a_run_without_nccl_asks_for_no_version(
    environments: Environments, overrides: tuple[str, ...], gpus: int
) -> None:
    config = _config(environments("2.29.7", "2.30.7"), *overrides)
    assert pair_of(config, _hosts(gpus=gpus), same_host=True) is None
    assert with_transport(config, _hosts(gpus=gpus)) == (config, "")


def test_a_running_server_has_an_unknown_environment(environments: Environments) -> None:
    environments("2.29.7", "2.30.7")
    config = _config("rollout.sglang={urls: [http://127.0.0.1:3000]}", "rollout.num_workers=1")
    assert with_transport(config, _hosts()) == (config, "")


@pytest.mark.parametrize(
    ("versions", "overrides", "state", "name", "words"),
    [
        (("2.30.7", "2.30.7"), (), "ok", "nccl", "2.30.7, here and in "),
        (("2.29.7", "2.30.7"), (), "unsure", "weights.transport", ", so weights go through files"),
        (("2.29.7", "2.30.7"), ("weights.transport=collective",), "wrong", "weights.transport", "does not form"),
        ((None, "2.30.7"), (), "unsure", "nccl", "the version of NCCL in "),
    ],
)
def test_the_doctor_compares_the_versions(
    environments: Environments,
    monkeypatch: pytest.MonkeyPatch,
    versions: tuple[str | None, str | None],
    overrides: tuple[str, ...],
    state: Any,
    name: str,
    words: str,
) -> None:
    play_driver(monkeypatch, 0, 0)
    options = ("rollout.engine=sglang", "learner.device=cuda", "rollout.device=cuda", environments(*versions))
    finding = only(check_nccl, state, *options, *overrides)
    assert (finding.name, words in finding.what) == (name, True), finding
    assert list(found(check_nccl, *options, "rollout.device=cpu")) == []


TORCH_SAYS = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.29.7\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nMismatched NCCL version detected : rank 1 version 23007 rank 0 version 22907"
)


def test_the_error_of_a_failed_group_names_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of another host: NCCL itself finds the other version, and torch puts it into the last line."""

    def fails(*_: object) -> object:
        raise RuntimeError(TORCH_SAYS)

    async def send() -> None:
        manifest = build_manifest([("a", torch.zeros(4))], bucket_bytes=2**16)
        sender = collective.CollectiveSender(manifest, host="127.0.0.1", device=torch.device("cpu"), timeout_s=5.0)
        buckets = await sender.stage()
        await sender.offer(buckets, ["w"])
        monkeypatch.setattr(collective, "_group", fails)
        await sender.send(buckets)

    with pytest.raises(WeightsError) as failed:
        asyncio.run(send())
    words = str(failed.value)
    assert ": Mismatched NCCL version detected : rank 1 version 23007 rank 0 version 22907; install the torch " in words
    assert words.endswith("set weights.transport=shared_memory")
    assert os.linesep not in words
