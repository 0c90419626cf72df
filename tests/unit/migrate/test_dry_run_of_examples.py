"""Each example of another system goes through `migrate` and `--dry-run`, with rows and a model's shape from files."""

import json
from pathlib import Path

import pytest
from support.migration import EXAMPLES

from areal_rloo.__main__ import main

GSM8K = {"question": "1+1=?", "answer": "1+1=2\n#### 2"}
MATH = {"problem": "What is $1+1$?", "solution": "It is \\boxed{2}.", "answer": "2"}
SHAPE = {
    **{"model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864},
    **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768},
}
REWARD = "data.train.rewards=[{function: rewards.py:score}]"  # of a plugin, so `migrate` leaves it to the user
OF_FILES = {
    "areal.yaml": ("data.train.path=gsm8k.jsonl", "data.eval.path=gsm8k.jsonl"),
    "verl.sh": tuple(
        f"data.{split}.{index}.path={name}.jsonl"
        for split in ("train", "eval")
        for index, name in enumerate(("gsm8k", "math"))
    ),
    "verl_small.sh": ("data.train.path=gsm8k.jsonl", "data.eval.path=gsm8k.jsonl"),
    "trl.py": tuple(
        f"data.{split}={{task: math, path: math.jsonl, fields: {{prompt: problem}}}}" for split in ("train", "eval")
    ),
    "swift.sh": ("data.train={task: rows, path: math.jsonl, fields: {prompt: problem}}", REWARD),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_config_of_an_example_has_a_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for rows, row in (("gsm8k", GSM8K), ("math", MATH)):
        Path(f"{rows}.jsonl").write_text(f"{json.dumps(row)}\n" * 2000)
    Path("rewards.py").write_text("def score(completion): return 1.0\n")
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(SHAPE))
    Path(name).write_text(EXAMPLES[name])
    assert main(["migrate", name]) == 0
    Path("mine.yaml").write_text(capsys.readouterr().out)
    described = ("launcher.memory_per_gpu=80GB", "launcher.gpus_per_host=8", "launcher.num_hosts=1", "model.path=model")
    code = main(["run", "--config", "mine.yaml", *described, *OF_FILES[name], "--dry-run"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "PROCESS" in shown.out
