"""The cache of real servers has the size that a plan for a shared GPU gives, in the same options."""

import json
import re
from pathlib import Path

import pytest
from support.patience import eventually
from support.server_support import SERVERS, EngineOnThread, request, results, running_engine

from areal_rloo.models.sizes import Sizes

pytestmark = pytest.mark.full

TOKENS = 5120  # 40 pages of 128


def _cache_tokens(engine: EngineOnThread, name: str) -> int | None:
    """Return the tokens of the cache in the server's own metrics; None before the server has written them."""
    text = engine.metrics_text()
    if name == "sglang":
        found = re.search(r"^sglang:max_total_num_tokens\{.*\} (\S+)$", text, re.MULTILINE)
        return int(float(found[1])) if found else None
    line = re.search(r"^vllm:cache_config_info\{.*$", text, re.MULTILINE)
    if line is None:
        return None
    block, num = (re.search(rf'\b{key}="(\d+)"', line[0]) for key in ("block_size", "num_gpu_blocks"))
    assert block is not None, line[0]
    assert num is not None, line[0]
    return int(block[1]) * int(num[1])


@pytest.mark.parametrize("name", SERVERS)
def test_a_real_server_has_the_cache_that_it_was_given(name: str, wide_folder: Path, tmp_path: Path) -> None:
    sizes = Sizes.of(json.loads((wide_folder / "config.json").read_text()))
    assert sizes is not None
    arguments = {
        "sglang": {"mem-fraction-static": 0.99, "max-total-tokens": TOKENS},
        "vllm": {"gpu-memory-utilization": 0.01, "kv-cache-memory-bytes": TOKENS * 4 * sizes.cache_numbers},
    }[name]
    with running_engine(wide_folder, tmp_path / "log", engine=name, arguments=arguments, context_tokens=4000) as engine:
        (completion,) = results(engine.submit([request("a")]))
        assert len(completion.tokens) == 20
        eventually(lambda: _cache_tokens(engine, name) is not None, "the server writes the metric")
        assert _cache_tokens(engine, name) == TOKENS
