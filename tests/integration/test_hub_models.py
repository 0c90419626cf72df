"""A run whose models have the names of a hub that cannot be reached: complete in the cache, or wrong."""

import socket
from pathlib import Path

from support.families import save_family
from support.local_runs import Run

from areal_rloo.models.tiny import make_tiny_tokenizer


def _put_into_cache(home: Path, name: str) -> None:
    """Save a qwen2 without a generation config where the hub's client keeps downloads."""
    cached = home / "hub" / f"models--org--{name}"
    snapshot = cached / "snapshots" / "abc"
    save_family("qwen2", snapshot)
    (snapshot / "generation_config.json").unlink()
    make_tiny_tokenizer().save_pretrained(snapshot)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")


def test_a_run_of_complete_models_does_not_ask_the_hub(tmp_path: Path) -> None:
    """Policy and reference; a request would find a hub that never answers."""
    home = tmp_path / "hf"
    _put_into_cache(home, "policy")
    _put_into_cache(home, "reference")
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        environment = {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}"}
        models = ["model.path=org/policy", "model.reference.path=org/reference", "algorithm.kl.coefficient=0.1"]
        run = Run(tmp_path / "run", *models, "learner.num_train_steps=2", "data.eval=null", environment=environment)
        code, output = run.wait()
        assert code == 0, output
        try:
            hub.accept()
        except BlockingIOError:
            asked = False
        else:
            asked = True
    assert not asked
    assert len(run.records()) == 2
