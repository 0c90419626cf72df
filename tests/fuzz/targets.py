"""The boundaries that the fuzzer tries: for each, a function of any bytes, and bytes to begin with.

A function returns if the bytes are good, or if they are refused with the error of their boundary. Any other exception
is a defect. The functions also check what must hold for good bytes: a decoded message encodes to the same message.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from areal_rloo.config import dump_config, load_config
from areal_rloo.errors import ConfigError, DecodeError, WireVersionError
from areal_rloo.rollout.chat_api import ApiError, read_request
from areal_rloo.tasks.answers import answer_key, answer_reward, extract_answer, last_number
from areal_rloo.tasks.math import extract_boxed
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire import messages as wire
from areal_rloo.wire.codec import decode_learner, decode_worker, encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.turns import RecordedTurn, decode_turns, encode_turns

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs"
LIMITS = Limits(max_message_bytes=2**20, max_trajectories=64, max_tokens=2**16)
_MOST_FRAMES = 8


@dataclass(frozen=True, slots=True)
class Target:
    """`try_bytes` raises an exception, other than those it expects, only for a defect. `seeds` are good bytes."""

    try_bytes: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]


@cache
def work_folder() -> Path:
    """Make a folder for the files of this process; the folder lives as long as the process."""
    folder = tempfile.mkdtemp(prefix="areal_rloo-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


# -- the wire ----------------------------------------------------------------------------------------------------------


_TODAY, _ANY = bytes([0x92, wire.WIRE_VERSION]), b"\x92\x00"  # how a first frame begins; version 0 stands for today's


def joined(frames: Sequence[bytes]) -> bytes:
    """Join frames as `_frames` cuts them: the lengths of all but the last, then the frames."""
    frames = [_ANY + frames[0].removeprefix(_TODAY), *frames[1:]]
    lengths = b"".join(len(frame).to_bytes(2, "little") for frame in frames[:-1])
    return bytes([len(frames) - 1]) + lengths + b"".join(frames)


def _frames(content: bytes) -> list[bytes]:
    num = content[0] % _MOST_FRAMES if content else 0
    at, frames = 1 + 2 * num, []
    for index in range(num):
        length = int.from_bytes(content[1 + 2 * index : 3 + 2 * index], "little")
        frames.append(content[at : at + length])
        at += length
    first, *rest = *frames, content[at:]
    return [_TODAY + first[2:] if first.startswith(_ANY) else first, *rest]


def _try_worker_message(content: bytes) -> None:
    try:
        message = decode_worker(_frames(content), LIMITS)
    except (DecodeError, WireVersionError):
        return
    again = decode_worker([bytes(frame) for frame in encode(message)], LIMITS)
    assert [bytes(frame) for frame in encode(again)] == [bytes(frame) for frame in encode(message)]
    if isinstance(message, wire.Results) and message.finished:
        made = [trajectory for _, trajectories in message.finished for trajectory in trajectories]
        assert message.extremes is not None, "the codec notes the extremes"
        assert message.extremes.highest_token == max(_highest_token(trajectory) for trajectory in made)
        assert message.extremes.lowest_version == min(int(each.completion.versions.min()) for each in made)
        assert message.extremes.highest_version == max(int(each.completion.versions.max()) for each in made)
        assert message.extremes.most_tokens == max(trajectory.num_tokens for trajectory in made)


def _highest_token(trajectory: Trajectory) -> int:
    return int(max(trajectory.prompt_tokens.max(), trajectory.completion.tokens.max()))


def _try_learner_message(content: bytes) -> None:
    try:
        message = decode_learner(_frames(content), LIMITS)
    except (DecodeError, WireVersionError):
        return
    assert decode_learner([bytes(frame) for frame in encode(message)], LIMITS) == message


def _try_turns(content: bytes) -> None:
    try:
        turns = decode_turns(content)
    except DecodeError:
        return
    if any(len(turn.completion.tokens) for turn in turns):
        assert decode_turns(encode_turns(turns))[0].prompt == turns[0].prompt


def _completion(num_tokens: int, spans: tuple[int, ...] = ()) -> Completion:
    ids = np.arange(num_tokens, dtype=np.int32)
    logprobs = np.full(num_tokens, -1.5, np.float32)
    return Completion(ids, logprobs, np.array([3] * (num_tokens - 1) + [4], np.int32), "stop", spans)


def _worker_messages() -> list[bytes]:
    duty, work = wire.Duty(7, 3, 1), wire.Work(2.5, 1000)
    prompt = np.array([5, 6], np.int32)
    plain = Trajectory(3, 1, prompt, _completion(4), 0.5)
    rich = Trajectory(3, 2, prompt, _completion(5, (2, 1, 2)), -1.0, {"math": 1.0}, np.ones(5, np.float32), "42")
    failed = wire.Failed(*duty, "reward_timeout", "no result", "some text")
    messages: list[wire.WorkerMessage] = [
        wire.Hello("rollout-0", "1", 64, 3, "learner", 1, 7, (duty,), work),
        wire.Heartbeat("learner", 2, 7, wire.digest([duty]), 3, 1, False, work),
        wire.Results("learner", 3, (wire.Finished(7, (plain,)), wire.Finished(7, (rich,))), (failed,)),
        wire.Results("learner", 3, (), (failed,)),
        wire.Partials("learner", 1, (wire.Partial(*duty, b"turns"),), True),
        wire.WeightsReady("learner", 5),
        wire.WeightsReceived("learner", 6, 5, 2**63),
        wire.WeightsFailed("learner", 7, 5, "checksum"),
        wire.Goodbye("learner", work, failed=True),
    ]
    return [joined([bytes(frame) for frame in encode(message)]) for message in messages]


def _learner_messages() -> list[bytes]:
    lease = wire.Lease(7, 3, (0, 1), (5, 6), Item("1+1=?", "2"), 3, 2**40, b"turns")
    messages: list[wire.LearnerMessage] = [
        wire.Welcome("learner", 1, (("before", 0), ("learner", 3))),
        wire.Leases("learner", (lease,)),
        wire.Ack(3),
        wire.HeartbeatReply("learner", 2, 7, say_hello=True),
        wire.WeightsCall("learner", 5),
        wire.WeightsNotice("learner", 5, 4, b"body"),
        wire.PartialsCall("learner", 1),
        wire.Abort("learner", (wire.Duty(7, 3, 1),)),
        wire.Drain(),
        wire.Refusal("unreadable", final=True),
    ]
    return [joined([bytes(frame) for frame in encode(message)]) for message in messages]


# -- configs, answers, chat requests -----------------------------------------------------------------------------------


def _try_config(content: bytes) -> None:
    path = work_folder() / "fuzzed.yaml"
    path.write_bytes(content)
    try:
        config = load_config(str(path))
    except ConfigError as error:
        assert "\n" not in str(error), "a mistake is a single line"
        return
    path.write_text(dump_config(config))
    assert load_config(str(path)) == config


def _try_answer(content: bytes) -> None:
    text = content.decode(errors="replace")
    for number in (extract_answer(text), last_number(text)):
        assert number is None or number.is_finite()
    assert answer_reward(text, text) == float(extract_answer(text) is not None)
    for fallback in (False, True):
        key = answer_key(text, fallback=fallback)
        assert key is None or answer_key(f"#### {key}") == key
    boxed = extract_boxed(text)
    assert boxed is None or boxed in text


def _try_chat_request(content: bytes) -> None:
    try:
        request = read_request(content)
    except ApiError as error:
        assert 400 <= error.status < 500
        return
    assert request.messages


def _chat_requests() -> list[bytes]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": [{"type": "text", "text": "1+1=?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    rich = {"model": "policy", "messages": messages, "tools": [tool], "stream": True, "max_tokens": 9, "temperature": 1}
    return [msgspec.json.encode(rich), msgspec.json.encode({"model": "m", "messages": messages[:1], "logprobs": True})]


_ANSWERS = (
    "3+5=8\n#### 8",
    "#### -US$1,234.50 dollars.",
    "#### \\(\\boxed{**1e3**}\\)",
    "so \\boxed{\\frac{1}{2}} and \\boxed 7$",
    "#### ٣٤٫٥ km/h",
)

TARGETS = {
    "worker_messages": Target(_try_worker_message, _worker_messages),
    "learner_messages": Target(_try_learner_message, _learner_messages),
    "turns": Target(_try_turns, lambda: [encode_turns([RecordedTurn(b"digest", _completion(4))] * 2)]),
    "configs": Target(_try_config, lambda: [path.read_bytes() for path in sorted(CONFIGS.glob("*.yaml"))]),
    "answers": Target(_try_answer, lambda: [text.encode() for text in _ANSWERS]),
    "chat_requests": Target(_try_chat_request, _chat_requests),
}


def corpus_file(name: str) -> Path:
    """Return the file with the inputs that are kept for a target: a zip, because the inputs are many and small."""
    return HERE / "corpus" / f"{name}.zip"


def corpus(name: str) -> list[bytes]:
    """Return the seeds and the kept inputs of a target."""
    kept = corpus_file(name)
    if not kept.is_file():
        return [*TARGETS[name].seeds()]
    with zipfile.ZipFile(kept) as inputs:
        return [*TARGETS[name].seeds(), *(inputs.read(member) for member in sorted(inputs.namelist()))]


def keep(name: str, inputs: Iterable[bytes]) -> None:
    """Replace the kept inputs of a target. The same inputs give the same file."""
    corpus_file(name).parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(corpus_file(name), "w", zipfile.ZIP_DEFLATED) as file:
        for content in sorted(set(inputs)):
            file.writestr(zipfile.ZipInfo(hashlib.sha1(content, usedforsecurity=False).hexdigest()), content)
