"""A real server that no worker starts, and the model that it serves."""

import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from support.patience import PATIENCE_S
from support.processes import ends_of_logs
from support.server_support import CONTEXT_TOKENS, MODEL_TOKENS, RealServer

from areal_rloo.config import ServerConfig, load_config
from areal_rloo.engines.kinds import kind_of
from areal_rloo.engines.server import ServerPlan
from areal_rloo.engines.server.process import ServerProcess
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import write_model
from areal_rloo.learner.team import Team
from areal_rloo.models.files import load_tokenizer


def export(folder: Path, made: Path) -> None:
    """Write a model in the form of a checkpoint, with tokenizer."""
    rank = build_rank(load_config("quickstart.yaml"), model_path=str(folder), device=torch.device("cpu"))
    write_model(made, rank.policy.causal, Team(rank).whole_weights(), tokenizer=load_tokenizer(str(folder)))


@contextmanager
def running_server(tested: RealServer, model: Path, log: Path) -> Iterator[ServerProcess]:
    """Start a server and wait until it answers."""
    plan = ServerPlan(model, "cpu", "float32", 1, 8, CONTEXT_TOKENS, 1, model_context_tokens=MODEL_TOKENS)
    process = ServerProcess(kind_of(tested.engine), tested.python(), ServerConfig(), plan, log)
    try:
        _wait_until_it_answers(process)
        yield process
    finally:
        process.kill()


def _wait_until_it_answers(server: ServerProcess) -> None:
    """Fail with the server's log if the server does not start: a run would wait for minutes, and say less."""
    asked = urllib.request.Request(f"{server.url}/health", headers={"Authorization": f"Bearer {server.api_key}"})
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=30) as reply:
                assert reply.status == 200
                return
        except OSError as error:
            ended = server.exit_code() is not None
            assert not ended and time.monotonic() < ends_s, f"{error}: {ends_of_logs([server.log])}"
            time.sleep(0.2)
