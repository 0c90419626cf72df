"""A download from the hub takes a single copy of the weights, from a hub of this test, and then works offline."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import save_file
from support.families import save_family

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_DOWNLOAD = "import sys; from areal_rloo.models.files import model_folder; print(model_folder(sys.argv[1]))"


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[Path, str]]:
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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, name="the hub")
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("max_shard_size", ["100KB", "1GB"])
def test_of_two_copies_of_the_weights_one_is_downloaded(
    published: tuple[Path, str], tmp_path: Path, max_shard_size: str
) -> None:
    folder, address = published
    save_family("mistral", tmp_path / "whole").save_pretrained(folder, max_shard_size=max_shard_size)
    expected = {path.name for path in folder.iterdir()}
    save_file({"layers.0.attention.wq.weight": torch.zeros(64, 64)}, folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    for offline in ("0", "1"):
        command = [sys.executable, "-c", _DOWNLOAD, "org/model"]
        done = subprocess.run(
            command, env={**environment, "HF_HUB_OFFLINE": offline}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert {path.name for path in Path(done.stdout.strip()).iterdir()} == expected
