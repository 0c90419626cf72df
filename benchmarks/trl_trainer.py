"""Train the quickstart's task with TRL's RLOOTrainer, for `trl_peer.py`; runs in an environment that has TRL.

    python -m benchmarks.trl_trainer --model FOLDER --num-steps 20 --output FILE

Prompts, reward, batch, lengths, optimizer and schedule are those of quickstart.yaml with overrides. Each train step of
two optimizer steps, as in the quickstart, gives a line of JSON with the seconds since the first, without evaluations.
Every fifth step has the greedy accuracy on held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import RLOOConfig, RLOOTrainer

from areal_rloo.config import load_config
from areal_rloo.models.files import load_tokenizer
from areal_rloo.tasks import load_eval, load_train
from areal_rloo.tasks.answers import answer_reward
from benchmarks import hardware
from benchmarks.coin import coin

_EVERY = 5  # train steps between two evaluations


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--evaluates", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--coin", action="store_true", help="reward by `coin.py`, not for the answer")
    parser.add_argument("overrides", nargs="*", help="of quickstart.yaml")
    arguments = parser.parse_args()
    config = load_config("quickstart.yaml", arguments.overrides)
    learner, optimizer = config.learner, config.learner.optimizer
    batch = learner.groups_per_step * config.algorithm.group_size
    micro = batch // 8
    (train,), (held_out,) = load_train(config.data, seed=0), load_eval(config.data, seed=0)
    rows = [{"prompt": item.text, "answer": item.answer} for item in train.items]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = load_tokenizer(arguments.model)
    steps = Steps(held_out.items[: config.data.eval_sources[0].num_prompts], tokenizer, arguments)
    trainer = RLOOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=_coin if arguments.coin else _reward,
        train_dataset=Dataset.from_list(rows),
        callbacks=[steps],
        args=RLOOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,  # as ours; RLOOConfig's own default costs a forward pass
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=batch // micro // learner.num_minibatches,
            generation_batch_size=batch,
            num_generations=config.algorithm.group_size,
            max_completion_length=config.rollout.sampling.max_new_tokens,
            temperature=config.rollout.sampling.temperature,
            beta=0.0,
            max_steps=arguments.num_steps * learner.num_minibatches,
            learning_rate=arguments.learning_rate,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm or 0.0,
            lr_scheduler_type="cosine",
            seed=0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()


def _coin(completions: list[str], **_: Any) -> list[float]:
    return [coin(text) for text in completions]


def _reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [answer_reward(text, right) for text, right in zip(completions, answer, strict=True)]


class Steps(TrainerCallback):
    """Writes a line after every train step."""

    def __init__(self, held_out: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
        self._held_out, self._tokenizer, self._arguments = held_out, tokenizer, arguments
        self._began_s = 0.0
        self._file = arguments.output.open("w")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._write(0, model)
        self._began_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % 2 == 0:
            now_s = time.perf_counter()
            self._write(state.global_step // 2, model, now_s - self._began_s)
            self._began_s += time.perf_counter() - now_s

    def _write(self, step: int, model: Any, seconds: float = 0.0) -> None:
        accuracy = self._accuracy(model) if self._arguments.evaluates and step % _EVERY == 0 else None
        line = {"step": step, "seconds": seconds, "accuracy": accuracy, "peak_bytes": hardware.status_bytes("VmHWM")}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    @torch.no_grad()
    def _accuracy(self, model: Any) -> float:
        inputs = self._tokenizer(
            [item.text for item in self._held_out], padding=True, padding_side="left", return_tensors="pt"
        )
        model.eval()
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=96)[:, inputs["input_ids"].shape[1] :]
        model.train()
        texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        scores = [answer_reward(text, item.answer) for text, item in zip(texts, self._held_out, strict=True)]
        return sum(scores) / len(scores)


if __name__ == "__main__":
    main()
