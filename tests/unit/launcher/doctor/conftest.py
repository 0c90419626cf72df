"""Model folders, complete or larger than any machine, and an HTTP server."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.situations import HUGE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder in two files of weights, 12 numbers in all."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "tokenizer.json").write_text("{}")
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name in names:
        save_file({name: np.zeros((2, 3), np.float32)}, folder / name)
    index = {"weight_map": {name: name for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def huge_model(model: Path) -> Path:
    """A model whose files are as long as they say, and mostly holes."""
    header = {"weight": {"dtype": "BF16", "shape": [HUGE], "data_offsets": [0, 2 * HUGE]}}
    text = json.dumps(header).encode()
    (model / "model.safetensors.index.json").unlink()
    for file in model.glob("*.safetensors"):
        file.unlink()
    with (model / "model.safetensors").open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        try:
            opened.truncate(8 + len(text) + 2 * HUGE)
        except OSError:
            pytest.skip("this file system has no files of that length")
    return model


@pytest.fixture
def server() -> Iterator[str]:
    """An HTTP server that has org/there and the first paths asked of SGLang, and nothing else."""
    there = ("/health", "/model_info", "/org/there/resolve/main/config.json")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in there else 404)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()
