"""`areal-rloo generate RUN_FOLDER|--config X.yaml --output FILE.jsonl`: write samples of the train prompts to a file.

A row has the prompt and the completion as texts and as token ids, the logprob of each token under the sampling
distribution, and the rewards. FILE.parquet needs pyarrow.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.config import Config
from areal_rloo.errors import ConfigError, PreflightError, install
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.launcher.start import check
from areal_rloo.learner.recording import RecordMaker
from areal_rloo.program import Parser
from areal_rloo.stages.samples import Made, Wanted, alone, load_model, make_samples, record_of
from areal_rloo.stages.source import parse
from areal_rloo.tasks import load_train
from areal_rloo.tasks.chat import Tokenizer
from areal_rloo.telemetry.logs import setup_logs
from areal_rloo.telemetry.record_file import RecordFile
from areal_rloo.waiting import run_beside_user_code, stop_at_ctrl_c

_DESCRIPTION = """\
Write samples of the train prompts (data.train), algorithm.group_size for each prompt, to a file.

examples:
  areal-rloo generate runs/latest --num-prompts 100 --output samples.jsonl
  areal-rloo generate --config gsm8k_rloo.yaml --num-prompts 1000 --output samples.parquet algorithm.group_size=4"""
_ROWS = 1000  # of a row group of parquet


class Row(msgspec.Struct, frozen=True):
    """A trajectory in the file. Lists of tokens have the same length."""

    source: str
    item_index: int  # place in the data
    sample_index: int  # among the samples of the prompt
    prompt: str
    prompt_token_ids: list[int]
    completion: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[int]  # numbers of tokens by the policy and by tools or users, in turn; empty: all by the policy
    policy_version: int  # of the model
    reward: float | None  # null: the sample failed
    reward_parts: dict[str, float]
    finish_reason: str
    failure: str | None


def main(arguments: Sequence[str]) -> int:
    """Generate, and print the number of rows.

    Raises:
        UserError: an argument, the config or the model is wrong.
    """
    parser = Parser(prog="areal-rloo generate", description=_DESCRIPTION, overrides=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a new .jsonl or .parquet")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="the first N, in the order of a run; default: all")
    options, source = parse(parser, arguments)
    if options.num_prompts is not None and options.num_prompts < 1:
        raise ConfigError(f"argument '--num-prompts': expected at least 1, got {options.num_prompts}")
    config = alone(source.config)
    check(config)
    if config.rollout.server is not None:
        (options.output.parent / "logs").mkdir(exist_ok=True)  # for the output of the server
    setup_logs("generate", level=config.telemetry.log_level, file=None)
    rows = _opened(options.output)
    num: int | None = None
    try:
        num = run_beside_user_code(_generate(config, source.version, options.num_prompts, rows, options.output.parent))
    except (KeyboardInterrupt, asyncio.CancelledError):
        where = f"the samples so far are in {options.output}" if rows.num else "there are no samples yet"
        print(f"stopped; {where}", file=sys.stderr)  # noqa: T201
        return 130
    finally:
        _close(rows, options.output, whole=num is not None)
    print(f"{num:,} samples: {options.output}")  # noqa: T201 - users read this line
    return 0


async def _generate(
    config: Config, version: int, num_prompts: int | None, rows: _Lines | _Parquet, folder: Path
) -> int:
    model = load_model(config)
    stop_at_ctrl_c()
    tokenize = Tokenizer(model.chat, config.data)
    sources = load_train(config.data, seed=config.run.seed, most_item_bytes=config.wire.most_item_bytes)
    records, num = RecordMaker(model.tokenizer), 0
    stream = PromptStream(sources, tokenize, seed=config.run.seed, num_epochs=1)
    wanted = itertools.chain.from_iterable(_groups(config, stream, num_prompts))
    making = make_samples(config, model, folder, wanted, policy_version=version)
    async with contextlib.aclosing(making) as samples:
        async for made in samples:
            num += 1
            for row in _rows(made, records, version):
                try:
                    rows.write(row)
                except OSError as error:
                    raise PreflightError(
                        f"argument '--output': cannot be written: {error.strerror}; free some disk"
                    ) from error
    return num


def _groups(config: Config, stream: PromptStream, num_prompts: int | None) -> Iterator[list[Wanted]]:
    size = config.algorithm.group_size
    for group_id in itertools.count() if num_prompts is None else range(num_prompts):
        prompt = stream.take()
        if prompt is None:
            return
        seed = (config.run.seed << 40) + (group_id << 20)
        yield [Wanted((group_id, index), prompt, seed + index) for index in range(size)]


def _rows(made: Made, records: RecordMaker, version: int) -> Iterator[Row]:
    """Give a row for each trajectory of a sample, and a row without tokens for a failed sample."""
    for index, record in enumerate(record_of(made, records, version)):
        trajectory = made.trajectories[index] if made.trajectories else None
        yield Row(
            source=record.source,
            item_index=record.item_index,
            sample_index=record.sample_index,
            prompt=record.prompt,
            prompt_token_ids=list(made.wanted.prompt.tokens)
            if trajectory is None
            else trajectory.prompt_tokens.tolist(),
            completion=record.completion,
            token_ids=record.token_ids,
            logprobs=[] if trajectory is None else trajectory.completion.behaviour_logprobs.tolist(),
            spans=record.spans,
            policy_version=record.policy_version,
            reward=record.reward,
            reward_parts=record.reward_parts,
            finish_reason=record.finish_reason,
            failure=record.dropped,
        )


class _Lines:
    """A file of JSON lines; every row is in the file at once, whole."""

    def __init__(self, path: Path) -> None:
        path.open("xb").close()
        self._file, self.num = RecordFile(path), 0

    def write(self, row: Row) -> None:
        self._file.append(msgspec.json.encode(row) + b"\n")
        self.num += 1

    def close(self) -> None:
        self._file.close()


class _Parquet:
    """A parquet file, complete once closed."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow  # noqa: PLC0415 - an extra
            from pyarrow import parquet  # noqa: PLC0415
        except ImportError as error:
            raise PreflightError(f"argument '--output': {path} needs pyarrow; {install('data')}") from error
        numbers, texts = pyarrow.list_(pyarrow.int64()), pyarrow.map_(pyarrow.string(), pyarrow.float64())
        kinds = {
            "token_ids": numbers,
            "prompt_token_ids": numbers,
            "spans": numbers,
            "logprobs": pyarrow.list_(pyarrow.float32()),
        }
        kinds |= {"reward_parts": texts, "reward": pyarrow.float64()}
        kinds |= dict.fromkeys(("item_index", "sample_index", "policy_version"), pyarrow.int64())
        fields = [(name, kinds.get(name, pyarrow.string())) for name in Row.__struct_fields__]
        self._schema = pyarrow.schema(fields)
        self._of_rows = pyarrow.Table.from_pylist
        self._stream = path.open("xb")
        self._file = parquet.ParquetWriter(self._stream, self._schema)
        self._rows: list[dict[str, Any]] = []
        self.num = 0

    def write(self, row: Row) -> None:
        self._rows.append(msgspec.structs.asdict(row))
        self.num += 1
        if len(self._rows) == _ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()
        self._stream.close()

    def _flush(self) -> None:
        if self._rows:
            self._file.write_table(self._of_rows(self._rows, schema=self._schema))
            self._rows = []


def _close(rows: _Lines | _Parquet, path: Path, *, whole: bool) -> None:
    """Close the file; remove a file without rows or without an end.

    Raises:
        PreflightError: the last rows cannot be written.
    """
    try:
        rows.close()
    except OSError as error:
        path.unlink()  # a parquet file without its end
        raise PreflightError(
            f"argument '--output': {path} cannot be written: {error.strerror}; free some disk"
        ) from error
    if not whole and rows.num == 0:
        path.unlink()


def _opened(path: Path) -> _Lines | _Parquet:
    """Make the file.

    Raises:
        UserError: the file exists, has another ending, or cannot be written.
    """
    kinds: dict[str, type[_Lines] | type[_Parquet]] = {".jsonl": _Lines, ".parquet": _Parquet}
    if path.suffix not in kinds:
        raise ConfigError(f"argument '--output': expected a file {' or '.join(kinds)}, got {path}")
    try:
        return kinds[path.suffix](path)
    except OSError as error:
        raise PreflightError(f"argument '--output': {path} cannot be made: {error.strerror}; choose another") from error
