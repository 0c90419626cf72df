"""Models and datasets of the hub, on hosts with and without it: a finding for each."""

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.http_servers import serving
from support.situations import downloaded, found, only

from areal_rloo.launcher.doctor import hub
from areal_rloo.launcher.doctor.hub import check_downloads, check_hub
from areal_rloo.launcher.doctor.inputs import check_data_files, check_models


def test_a_hub_model_offline_is_wrong_unless_cached(model: Path, tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path / "hf")}
    named = "model.path=org/name"
    assert "every host will download" in only(check_downloads, "unsure", named, **home).what
    offline = {**home, "HF_HUB_OFFLINE": "1"}
    finding = only(check_downloads, "wrong", named, **offline)
    assert "not in " in finding.what and finding.fix.startswith("unset HF_HUB_OFFLINE")
    snapshot = downloaded(model, tmp_path / "hf")
    assert only(check_downloads, "ok", named, **offline).what == "org/name: downloaded, 12 parameters"
    (snapshot / "model-00001-of-00002.safetensors").unlink()
    assert "1 of its 2 files of weights are missing" in only(check_downloads, "wrong", named, **offline).what
    assert found(check_models, named, **offline) == [], "files may be missing, so nothing refuses the model"


def test_a_name_unknown_to_the_hub_is_wrong(server: str, tmp_path: Path) -> None:
    where = {"HF_ENDPOINT": server, "HF_HOME": str(tmp_path)}
    assert only(check_hub, "wrong", "model.path=org/absent", **where).what.endswith(f"{server}: HTTP 404")
    assert only(check_hub, "unsure", "model.path=org/there", **where).what.endswith(f"{server} has it")
    offline = only(check_hub, "wrong", "model.path=org/absent", **where, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline.what, "nothing is asked"


def test_a_dataset_that_the_hub_lacks_is_wrong(server: str, tmp_path: Path) -> None:
    where = {"HF_ENDPOINT": server, "HF_HOME": str(tmp_path)}
    for override, name in (("data.train.task=gsm8k", "data.train.path"), ("data.train.hub=org/no", "data.train.hub")):
        finding = only(check_hub, "wrong", "data.train.task=gsm8k", override, "data.eval=null", **where)
        assert (finding.name, finding.what.endswith(f"{server}: HTTP 404")) == (name, True)
    (tmp_path / "datasets" / "openai___gsm8k").mkdir(parents=True)
    assert found(check_hub, "data.train.task=gsm8k", "data.eval=null", **where) == []


def test_each_model_and_dataset_has_a_single_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"HF_ENDPOINT": "http://nobody.invalid", "HF_HOME": str(tmp_path)}
    options = ("model.path=org/name", "data.train.task=gsm8k", "data.eval={task: gsm8k, num_prompts: 4}")
    reward = "data.train.rewards=[{model: org/judge}]"
    keys = ["model.path", "data.train.rewards.0.model", "data.train.path", "data.eval.path"]
    for library in (None, object()):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, spec=library: spec)
        findings = found(check_hub, *options, reward, **where)
        assert [(finding.name, finding.state) for finding in findings] == [(key, "wrong") for key in keys]
        assert all("no address for this host (" in finding.what for finding in findings)
        assert ("needs the `datasets` library" in findings[-1].what) == (library is None)
        (data,) = found(check_data_files, *options)
        assert data.what == "tasks and rewards are in order; not here yet: data.train.path, data.eval.path"


def test_a_dataset_that_cannot_be_downloaded_is_wrong(tmp_path: Path) -> None:
    where = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    finding = only(check_downloads, "wrong", "data.train.task=gsm8k", "data.eval=null", **where)
    assert finding.name == "data.train.path"
    assert "HF_HUB_OFFLINE is set" in finding.what or "needs the `datasets` library" in finding.what
    assert found(check_downloads, **where) == []


@pytest.mark.parametrize("hangs", ["name", "answer"])
def test_a_silent_hub_is_asked_once_and_for_a_limited_time(hangs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that drops packets: no error ever comes."""
    monkeypatch.setattr(hub, "_HUB_S", 0.2)
    asked, ends = [], threading.Event()

    def hang(*_: object, **__: object) -> list[Any]:
        asked.append(1)
        ends.wait(30)
        return []

    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never answers
        if hangs == "name":
            monkeypatch.setattr(socket, "getaddrinfo", hang)
        endpoint = {"name": "http://nobody.invalid", "answer": f"http://127.0.0.1:{server.getsockname()[1]}"}[hangs]
        where = {"HF_ENDPOINT": endpoint, "HF_HOME": "/nowhere"}
        findings = found(check_hub, "model.path=org/name", "data.train.task=gsm8k", "data.eval=null", **where)
        ends.set()
    assert [finding.what.partition(f"{endpoint}: ")[2] for finding in findings] == ["no answer within 0.2 s"] * 2
    assert len(asked) == (hangs == "name")
    assert (
        findings[0].fix
        == "check model.path, mend the network, or download it elsewhere and set model.path to its folder"
    )


LATER = "try again later"


@pytest.mark.parametrize(
    ("status", "body", "says", "mend"),
    [
        (200, b"<html>please log in</html>", "wrong", "check model.path, mend the network"),
        (200, b'{"model_type": "llama"}', "unsure", ""),
        (200, b" " * 2**21, "wrong", "check model.path, mend the network"),
        (404, b"", "wrong", "correct model.path, log in with `hf auth login`"),
        (503, b"", "wrong", LATER),
        (429, b"", "wrong", LATER),
    ],
)
def test_an_answer_of_the_hub_that_is_no_json_is_wrong(status: int, body: bytes, says: str, mend: str) -> None:
    """A network with a login page answers every address with a page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with serving(Page) as endpoint:
        finding = only(check_hub, says, "model.path=org/name", HF_ENDPOINT=endpoint, HF_HOME="/nowhere")
    assert says == "unsure" or finding.fix == f"{mend}, or download it elsewhere and set model.path to its folder"
