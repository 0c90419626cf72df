"""`areal-rloo export --push` with the real client of the hub, and a hub on this machine."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.http_servers import serving

_PUSH = """
import sys
from pathlib import Path
from areal_rloo.errors import PreflightError
from areal_rloo.stages.export import _pushed
try:
    print(_pushed(Path(sys.argv[1]), "me/mine"))
except PreflightError as error:
    sys.exit(f"error: {error}")
"""


class _Hub(BaseHTTPRequestHandler):
    """A hub with one model. Large files go to a place of their own, as on the real hub."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    large: dict[str, bytes]
    allows: bool

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.allows:
            self._answer({"error": "You don't have the rights"}, 403)
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                self._keep(line["key"], line["value"])
            self._answer({"commitUrl": f"{self._root}/me/mine/commit/1", "commitOid": "1", "success": True})
        elif self.path.endswith("/preupload/main"):
            modes = {True: "lfs", False: "regular"}
            asked = [each["path"] for each in json.loads(body)["files"]]
            files = [
                {"path": path, "uploadMode": modes[path.endswith(".safetensors")], "shouldIgnore": False}
                for path in asked
            ]
            self._answer({"files": files})
        elif self.path.endswith("/objects/batch"):
            asked = [each["oid"] for each in json.loads(body)["objects"]]
            places = [
                {"oid": oid, "size": 1, "actions": {"upload": {"href": f"{self._root}/large/{oid}"}}} for oid in asked
            ]
            self._answer({"transfer": "basic", "objects": places})
        else:
            self._answer({"url": f"{self._root}/me/mine", "errors": [], "warnings": []})

    def do_PUT(self) -> None:
        self.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({})

    def do_GET(self) -> None:
        self._answer({"id": "me/mine", "sha": "0"})

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    @property
    def _root(self) -> str:
        return f"http://{self.headers['Host']}"

    def _keep(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "file":
            self.files[value["path"]] = base64.b64decode(value["content"])
        elif kind == "lfsFile":
            self.files[value["path"]] = self.large[value["oid"]]

    def _answer(self, answer: object, status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[tuple[type[_Hub], str]]:
    """The hub, and its address."""
    handler = type("Hub", (_Hub,), {"files": {}, "large": {}, "allows": True})
    with serving(handler) as address:
        yield handler, address


def _push(folder: Path, address: str, home: Path) -> subprocess.CompletedProcess[str]:
    variables = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_test"}
    command = [sys.executable, "-c", _PUSH, str(folder)]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=120)


def _exported(folder: Path) -> dict[str, bytes]:
    files = {
        "README.md": b"---\ntags: [areal-rloo]\n---\n# a run\n",
        "config.json": b"{}",
        "model.safetensors": os.urandom(20_000),
    }
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def test_all_files_arrive_at_the_hub(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    files = _exported(tmp_path / "model")
    done = _push(tmp_path / "model", hub[1], tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/me/mine/tree/main/") or "/me/mine" in done.stdout
    assert hub[0].files == files


def test_a_hub_that_refuses_is_an_error_in_words(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    _exported(tmp_path / "model")
    hub[0].allows = False
    done = _push(tmp_path / "model", hub[1], tmp_path / "home")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: argument '--push': the hub refuses me/mine, or cannot be reached: " in done.stderr
    assert f"{tmp_path / 'model'} is complete" in done.stderr
