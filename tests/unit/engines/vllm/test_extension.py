"""The extension that runs inside vLLM, as far as it runs without vLLM: the wait for a broadcast."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import areal_rloo.engines.vllm as package


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with names in place of the parts of vLLM that it imports."""
    for name, attribute in (("vllm.config", "set_current_vllm_config"), ("vllm.model_executor.layers", "utils")):
        stand_in = types.ModuleType(name)
        setattr(stand_in, attribute, types.SimpleNamespace(dispatch_cpu_unquantized_gemm=None))
        monkeypatch.setitem(sys.modules, name, stand_in)
    path = Path(package.__file__).parent / "inside" / "areal_rloo_vllm.py"
    spec = importlib.util.spec_from_file_location("extension", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Broadcast:
    """A broadcast that is done after some looks, and its group."""

    def __init__(self, looks: int) -> None:
        self.looks, self.aborted = looks, 0

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def abort(self) -> None:
        self.aborted += 1


def test_a_broadcast_without_its_sender_is_given_up_and_the_group_ended(extension: Any) -> None:
    """NCCL's own wait has no end, and its watchdog would end the server."""
    silent, slow = _Broadcast(looks=10**9), _Broadcast(looks=3)
    with pytest.raises(RuntimeError, match=r"no weights within 0\.05 s"):
        extension._await(silent, silent, 0.05)
    extension._await(slow, slow, 60.0)
    assert (silent.aborted, slow.aborted) == (1, 0)
