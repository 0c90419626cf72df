"""Fuzz what a run reads back from its folder: checkpoints, recorded batches, model folders, records and reports."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, cast, get_type_hints

import msgspec
import numpy as np
import torch
from fuzz.damage import Files, Whole
from fuzz.targets import Target, work_folder
from safetensors.torch import save_file
from torch.optim import AdamW, Optimizer

from areal_rloo.engines.server.model_folder import read_model
from areal_rloo.errors import DataError, DecodeError, ModelError, UserError
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.launcher.run_folder import is_finished
from areal_rloo.learner.batches import encode_batch, read_batch
from areal_rloo.learner.checkpoint import read_checkpoint, read_state
from areal_rloo.learner.parallel.files import load_shards, save_shards, state_of
from areal_rloo.learner.parallel.ranks import Ranks
from areal_rloo.learner.state import LearnerState, Totals, capture, restore_ledger
from areal_rloo.models.folder import check_model_folder, check_policy_weights, check_tokenizer, num_parameters
from areal_rloo.models.policy import Policy
from areal_rloo.models.trainable import check_trainable
from areal_rloo.report import write_report
from areal_rloo.tasks import Item, Source
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.record_file import cut_records
from areal_rloo.telemetry.records import EvalRecord, LedgerCounts, TrainRecord
from areal_rloo.telemetry.summary import summarize_killed
from areal_rloo.telemetry.trajectories import TrajectoryFile, TrajectoryRecord
from areal_rloo.trajectory import Completion, Group, Trajectory
from areal_rloo.wire.turns import RecordedTurn, encode_turns


def _check_line(error: Exception, *names: str) -> None:
    text = str(error)
    assert text and text.isprintable(), "an error is a single line"
    assert any(name in text for name in names), f"an error names the file: {text}"


# -- checkpoints -------------------------------------------------------------------------------------------------------

_STEP = "step-000003"


def _stream() -> PromptStream:
    items = [Item(str(number)) for number in range(9)]
    return PromptStream([Source("all", items)], lambda item, _: (int(item.text) + 1,), seed=0, num_epochs=None)


def _completion(num_tokens: int, spans: tuple[int, ...] = ()) -> Completion:
    ids, logprobs = np.arange(num_tokens, dtype=np.int32), np.full(num_tokens, -1.5, np.float32)
    return Completion(ids, logprobs, np.array([2] * (num_tokens - 1) + [3], np.int32), "stop", spans)


def _trajectory(group_id: int, sample_index: int, completion: Completion) -> Trajectory:
    rewards = np.ones(len(completion.tokens), np.float32) if completion.spans else None
    return Trajectory(
        group_id, sample_index, np.array([3, 4], np.int32), completion, 0.5, {"right": 1.0}, rewards, "42"
    )


def _state() -> LearnerState:
    """Return a state with a group in flight, and a group with a finished sample and a partial rollout."""
    prompts, ledger = _stream(), Ledger()
    for _ in range(2):
        prompt = prompts.take()
        assert prompt is not None
        ledger.admit(prompt, group_size=2, admission_version=3, deadline=4)
    ledger.drop_sample((0, 1), "generation_failed")
    ledger.groups[1].samples[0].finish([_trajectory(1, 0, _completion(4)), _trajectory(1, 0, _completion(3, (1, 2)))])
    ledger.groups[1].samples[1].partial = encode_turns([RecordedTurn(b"digest", _completion(4))])
    prompts.give_back(0, 5)
    totals = Totals(trained_tokens=7, staleness_tokens={0: 4, 1: 3}, wall_s=1.5)
    return LearnerState(
        **capture(ledger, prompts).encoded(),
        policy_version=3,
        history=(("before", 0), ("learner", 2)),
        totals=totals,
        kl_coefficient=0.1,
        num_optimizer_steps=3,
        base="a1",
    )


def _learner() -> tuple[Policy, Optimizer]:
    """Return the least that has weights and moments: files of a model would only be longer."""
    causal = torch.nn.Linear(2, 1)
    return cast("Policy", SimpleNamespace(causal=causal)), AdamW(causal.parameters())


@cache
def _checkpoint() -> tuple[Whole, Policy, Optimizer]:
    folder = work_folder() / "checkpoints" / _STEP
    (folder / "shards").mkdir(parents=True)
    (folder / "model").mkdir()
    policy, optimizer = _learner()
    policy.causal(torch.ones(2)).sum().backward()
    optimizer.step()
    save_shards(state_of(policy, optimizer, None, 0), folder / "shards", Ranks()).result()
    save_file({"weight": torch.ones(2, 1)}, folder / "model" / "model.safetensors")
    (folder / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "state.msgpack").write_bytes(msgspec.msgpack.encode(_state()))
    (folder / "config.yaml").write_text("run:\n  seed: 3\nlearner:\n  groups_per_step: 2\n")
    (folder / "checksums.json").write_bytes(b"{}")
    for name, content in _resealed(Whole(folder).files).items():
        (folder / name).write_bytes(content)
    return Whole(folder, reseal=_resealed), policy, optimizer


def _checkpoint_seeds() -> list[bytes]:
    return _checkpoint()[0].seeds()


def _resealed(files: Files) -> Files:
    sums = {name: hashlib.sha256(files[name]).hexdigest() for name in files if name != "checksums.json"}
    return files | {"checksums.json": msgspec.json.encode(sums)}


def _try_checkpoint(content: bytes) -> None:
    whole, policy, optimizer = _checkpoint()
    optimizer.state.clear()
    random = torch.get_rng_state()
    with whole.damaged(content) as folder:
        try:
            state = read_checkpoint(folder)
            stream = _stream()
            ledger = restore_ledger(state, stream)
            load_shards(folder / "shards", Ranks(), policy, optimizer, None)
        except DecodeError as error:
            return _check_line(error, *whole.files, f"{_STEP}/model", " is missing")
        except UserError as error:
            return _check_line(error, _STEP, "checkpoint")
        finally:
            torch.set_rng_state(random)
        again = msgspec.structs.replace(state, **capture(ledger, stream).encoded())
        (folder / "state.msgpack").write_bytes(msgspec.msgpack.encode(again))
        assert read_state(folder) == again
        (folder / "state.msgpack").write_bytes(whole.files["state.msgpack"])
    for _ in range(len(ledger.groups) + 9):  # the stream goes on
        assert stream.take() is not None
    return None


# -- recorded batches --------------------------------------------------------------------------------------------------


def _batch() -> list[Group]:
    plain, rich = _completion(4), _completion(3, (1, 2))
    return [
        Group(5, 4, (_trajectory(5, 0, plain), _trajectory(5, 1, rich)), "math", 1, 7),
        Group(6, 5, (_trajectory(6, 1, plain),), "code", 0, 3),
    ]


_DIGEST_BYTES = 16


def _try_batch(content: bytes) -> None:
    """The first byte says if the digest is right."""
    path, body = work_folder() / "step-000004-0.msgpack", content[1:]
    if content[:1] != b"\0":
        body = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body
    path.write_bytes(body)
    try:
        batch = read_batch(path)
    except DataError as error:
        return _check_line(error, path.name)
    assert batch and all(group.trajectories for group in batch)
    encoded = encode_batch(batch)
    path.write_bytes(encoded)
    assert encode_batch(read_batch(path)) == encoded
    return None


def _batches() -> list[bytes]:
    encoded = encode_batch(_batch())
    return [b"\0" + encoded, b"\1" + encoded[_DIGEST_BYTES:], b"\1" + encode_batch(_batch()[1:])[_DIGEST_BYTES:]]


# -- model folders -----------------------------------------------------------------------------------------------------


@cache
def _model() -> Whole:
    folder = work_folder() / "model"
    folder.mkdir()
    save_file({"embed": torch.ones(3, 2), "norm": torch.ones(2)}, folder / "model-1.safetensors", {"format": "pt"})
    save_file({"head": torch.ones(3, 2, dtype=torch.bfloat16)}, folder / "model-2.safetensors")
    index = {
        "weight_map": {"embed": "model-1.safetensors", "norm": "model-1.safetensors", "head": "model-2.safetensors"}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "qwen2",
        "vocab_size": 3,
        "max_position_embeddings": 64,
        "architectures": ["Qwen2ForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return Whole(folder)


def _try_model(content: bytes) -> None:
    whole = _model()
    with whole.damaged(content) as folder:
        readers: list[Callable[[], object]] = [
            lambda: check_model_folder("model.path", str(folder), else_expected="a folder", files="a model folder"),
            lambda: check_trainable("model.path", folder, context_tokens=64),
            lambda: check_policy_weights("model.path", folder),
            lambda: check_tokenizer("model.path", folder),
            lambda: num_parameters(folder),
            lambda: read_model(folder),
        ]
        for read in readers:
            try:
                read()
            except ModelError as error:
                _check_line(error, str(folder))


# -- the records of a run ----------------------------------------------------------------------------------------------

_VALUES: dict[Any, Any] = {
    int: 3,
    float: 0.5,
    dict[str, float]: {"math": 0.5},
    dict[int, int]: {0: 2, 1: 1},
    dict[int, float]: {0: 0.5},
    dict[str, int]: {"stale": 3},
    str: "math",
}


def _numbers(kind: type) -> dict[str, Any]:
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.__struct_fields__}
    return {name: _VALUES[hint] for name, hint in hints.items() if hint in _VALUES}


@cache
def _run_folder() -> Whole:
    folder = work_folder() / "run"
    (folder / "configs").mkdir(parents=True)
    metrics = MetricsFile(folder / "metrics.jsonl")
    ledger = LedgerCounts(**_numbers(LedgerCounts))
    train = TrainRecord(**_numbers(TrainRecord) | {"reward_mean": math.nan}, ledger=ledger)
    for record in (train, EvalRecord(**_numbers(EvalRecord)), train):
        metrics.append(record)
    metrics.close()
    trajectories = TrajectoryFile(folder / "trajectories.jsonl")
    numbers = {
        **{"policy_version": 3, "group_id": 4, "sample_index": 1, "source": "math", "epoch": 0, "item_index": 7},
        **{"prompt": "3 + 4 =", "pieces": ["7", "."], "token_ids": [7, 2], "logprobs": [-0.5, math.nan]},
        **{"versions": [[2, 1], [3, 1]], "spans": [1, 1], "reward": 1.0, "reward_parts": {"right": 1.0}},
        **{"advantage": 0.5, "advantages": [0.5, 0.0], "staleness": 1, "finish_reason": "stop", "dropped": None},
    }
    trajectories.append([TrajectoryRecord(**numbers)])
    trajectories.close()
    (folder / "config.yaml").write_text("run:\n  seed: 3\n")
    (folder / "configs" / "step-000000.yaml").write_text("run:\n  seed: 3\n")
    (folder / "configs" / "step-000002.yaml").write_text("run:\n  seed: 3\nlearner:\n  groups_per_step: 2\n")
    summarize_killed(folder, warm_start_s=1.5).write(folder / "summary.json")
    return Whole(folder)


def _try_run_folder(content: bytes) -> None:
    with _run_folder().damaged(content) as folder:
        try:
            write_report(folder)
        except DataError as error:
            _check_line(error, str(folder))
        is_finished(folder)
        try:
            cut_records(folder / "metrics.jsonl", 3)
            summarize_killed(folder, warm_start_s=1.5)
        except DataError as error:
            _check_line(error, str(folder))
        finally:
            (folder / "report.html").unlink(missing_ok=True)
            (folder / "trajectories.html").unlink(missing_ok=True)


def _checkpoint_seeds() -> list[bytes]:
    return _checkpoint()[0].seeds()


def _model_seeds() -> list[bytes]:
    return _model().seeds()


def _run_folder_seeds() -> list[bytes]:
    return _run_folder().seeds()


TARGETS: dict[str, Any] = {
    "checkpoints": Target(_try_checkpoint, _checkpoint_seeds),
    "batches": Target(_try_batch, _batches),
    "models": Target(_try_model, _model_seeds),
    "run_folders": Target(_try_run_folder, _run_folder_seeds),
}
