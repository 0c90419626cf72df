"""Extends a vLLM server: `Weights` receives weights and digests them, `Guard` asks for the API key in every call.

    vllm serve MODEL --worker-extension-cls areal_rloo_vllm.Weights --middleware areal_rloo_vllm.Guard ...

Runs in vLLM's Python, so it imports nothing of areal_rloo. POST /collective_rpc calls the methods of `Weights` on every
rank. vLLM's own update calls know no Gloo and no files, and its own checksum reads all of the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import utils

PROTOCOL = 1  # changes with the methods of `Weights`


class Weights:
    """Becomes a base class of vLLM's worker; `rank`, `device`, `model_runner` and `vllm_config` are the worker's."""

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any
    _areal_group: Any = None
    _areal_timeout_s = 0.0

    def areal_describe(self) -> dict[str, Any]:
        """Return the facts of this rank."""
        parallel, model = self.vllm_config.parallel_config, self.vllm_config.model_config
        return {
            "protocol": PROTOCOL,
            "rank": self.rank,
            "tensor_parallel": parallel.tensor_parallel_size,
            "data_parallel": parallel.data_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
            "quantization": model.quantization,
            "logprobs": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
        }

    def areal_join(
        self, host: str, port: int, name: str, rank_offset: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Join a sender's group; blocks until all members are there. A former group ends."""
        self._areal_group, self._areal_timeout_s = None, timeout_s
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        device = "cuda" if backend == "nccl" else "cpu"
        prefixed = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._areal_group = _group(prefixed, rank_offset + self.rank, world_size, backend, host, timeout)

    def areal_receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> str | None:
        """Receive a bucket and load its tensors; returns why nothing arrived, and then nothing is loaded."""
        kinds = [getattr(torch, dtype) for dtype in dtypes]
        sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            work = self._areal_group.broadcast([flat], options)
            if self.device.type == "cuda":
                _await(work, self._areal_group, self._areal_timeout_s)
            work.wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:  # noqa: BLE001 - whatever the reason, this rank has loaded nothing of the bucket
            return f"{type(error).__name__}: {error}"
        parts = zip(names, flat.split(sizes), kinds, shapes, strict=True)
        self._areal_load((name, part.view(kind).view(shape)) for name, part, kind, shape in parts)
        return None

    def areal_read(self, folder: str) -> None:
        """Load the safetensors files of a folder."""
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                self._areal_load((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118

    def areal_digests(self, names: list[str]) -> dict[str, str]:
        """Return the first 8 bytes of SHA-256 of these parameters, by vLLM's names, in hexadecimal."""
        held = dict(self.model_runner.get_model().named_parameters())
        return {name: _digest(held[name]) for name in names if name in held}

    def _areal_load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(weights)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _await(work: Any, group: Any, timeout_s: float) -> None:
    """Wait for a broadcast by polling: NCCL's own wait only orders streams, and its timeout ends the process.

    Raises:
        RuntimeError: the sender did not send in time; the group is gone.
    """
    ends_s = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > ends_s:
            group.abort()
            raise RuntimeError(f"no weights within {timeout_s:g} s")
        time.sleep(0.001)


def _group(store: Any, rank: int, size: int, backend: str, host: str, timeout: timedelta) -> Any:
    """Meet the other ranks, as areal_rloo/weights/collective.py does."""
    if backend == "nccl":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 - absent from CPU builds of torch

        options = ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # ours ends the broadcast first; NCCL's ends the process
        return ProcessGroupNCCL(store, rank, size, options)
    gloo_options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo_options._timeout = timeout
    gloo_options._devices = [ProcessGroupGloo.create_device(hostname=_address_towards(host))]
    return ProcessGroupGloo(store, rank, size, gloo_options)


def _address_towards(host: str) -> str:
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def _digest(parameter: torch.Tensor) -> str:
    flat = parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(flat.data).digest()[:8].hex()


class Guard:
    """ASGI middleware: every call needs the key. vLLM's own check covers only some paths, and no update of weights."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {_api_key()}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] != "http" or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        body = json.dumps({"error": "Unauthorized"}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _api_key() -> str:
    """Return the key of VLLM_API_KEY, or of the file that --config names."""
    if "--config" in sys.argv:
        for line in Path(sys.argv[sys.argv.index("--config") + 1]).read_text().splitlines():
            name, _, key = line.partition(":")
            if name == "api-key":
                return key.strip()
    return os.environ["VLLM_API_KEY"]


def _keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Multiply with the parameters themselves. On a CPU, vLLM multiplies with a packed copy, which no update changes,
    and drops the parameters, so nothing shows the weights in use.
    """
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


def _die_with_server(server: int) -> None:
    """Kill the processes of a killed server: vLLM's engine would go on, and keep the device."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(server)], [], [])
    os.killpg(server, signal.SIGKILL)


utils.dispatch_cpu_unquantized_gemm = _keep_weights  # a worker imports this module before it loads the model
if os.environ.get("AREAL_RLOO_VLLM_MANAGED") == "1" and os.getpid() != os.getsid(0):  # the leader is the server
    threading.Thread(target=_die_with_server, args=[os.getsid(0)], name="the end of the server", daemon=True).start()
