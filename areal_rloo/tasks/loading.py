"""Find the task of a source, and load the sources of a split: limit, deduplicate and label items, and add few-shots.

`check_data` checks the sources before the run starts.

If an evaluation set of a file task names no data, use the `test` file beside the train file of the same task.
"""

from __future__ import annotations

import inspect
import itertools
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_rloo.config import ConfiguredSource, DataConfig, EvalSourceConfig, SourceConfig, import_named
from areal_rloo.errors import DataError, SourceError, UserError, raised
from areal_rloo.tasks.arithmetic import ArithmeticTask
from areal_rloo.tasks.base import Item, LazyItems, Message, Split, Task, closest
from areal_rloo.tasks.code.task import CodeTask
from areal_rloo.tasks.demonstrations import DemonstrationsTask
from areal_rloo.tasks.math import MathTask
from areal_rloo.tasks.reasoning_gym import ReasoningGymTask
from areal_rloo.tasks.rows import RowsTask, RowTask
from areal_rloo.tasks.sendable import MOST_BYTES, check_sendable
from areal_rloo.tasks.word_problems import Gsm8kTask, SvampTask
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

TASKS: Mapping[str, Callable[[ConfiguredSource, int], Task]] = {
    "arithmetic": ArithmeticTask,
    "code": CodeTask,
    "demonstrations": DemonstrationsTask,
    "gsm8k": Gsm8kTask,
    "math": MathTask,
    "reasoning_gym": ReasoningGymTask,
    "rows": RowsTask,
    "svamp": SvampTask,
}

_READ_BYTES = 64 * 2**20  # rows of larger files are not checked before the start; reading takes about a second
_PARTS = 32  # of a source, whose ends are looked at to notice other items on a resume, and mistakes before the start

Looked = dict[tuple[Split, str], Sequence[Item]]
"""Some items, or all, of the sources read before the start, by split and label."""


@dataclass(frozen=True, slots=True)
class Source:
    """The items of a source. `weight`: share of a mixture; None if shares follow sizes."""

    label: str
    items: Sequence[Item]
    weight: float | None = None
    num_duplicates: int = 0

    @property
    def description(self) -> str:
        """The number and some of the items: a resume notices others."""
        looked_at = [item.text for item in _some_of(self.items)]
        digest = zlib.crc32("\0".join(looked_at).encode(errors="surrogatepass"))
        return f"{self.label} ({len(self.items)} items, {digest:08x})"


def check_same_sources(before: Sequence[str], now: Sequence[str]) -> None:
    """Compare the descriptions of the sources in a checkpoint with those of the present.

    Raises:
        DataError: they differ.
    """
    if list(before) != list(now):
        raise DataError(
            f"data.train: the checkpoint was made with {', '.join(before)}; got {', '.join(now)}; resume with the "
            "config and the data it was made with"
        )


def make_task(key: str, source: ConfiguredSource, *, seed: int) -> Task:
    """Make the task that a source names. `key`: of the source in the config, for errors.

    Raises:
        DataError: no such task exists, or the task refuses the source.
        ConfigError: the name is an import path, and the import fails.
    """
    if ":" in source.task:
        make = import_named(f"{key}.task", source.task, kind="class")
        if not isinstance(make, type) or not issubclass(make, Task):
            expected = f"{key}.task: expected {source.task} to be a subclass of areal_rloo.tasks.Task"
            got = "a class without this base" if isinstance(make, type) else type(make).__name__
            raise DataError(f"{expected}, got {got}")
        with _users_code(key, f"{source.task} cannot be made"):
            task = _made(key, make, source, seed)
        try:
            inspect.signature(task.reward).bind("", Item(""))
        except (TypeError, ValueError) as error:
            expected = f"{key}.task: expected {source.task}.reward(self, completion, item)"
            raise DataError(f"{expected}, but it cannot be called with these: {error}") from error
        return task
    if source.task not in TASKS:
        hint = closest(source.task, TASKS, f"expected one of {', '.join(TASKS)}, or file.py:Class")
        raise DataError(f"{key}.task: unknown task '{source.task}'; {hint}")
    with _options_of(key):
        return TASKS[source.task](source, seed)


def _made(key: str, make: Callable[..., Task], source: ConfiguredSource, seed: int) -> Task:
    try:
        return make(source, seed)
    except SourceError:
        raise
    except UserError as error:  # raised by the user's code, which does not know the key
        raise DataError(f"{key}: {error}") from error


def load_train(data: DataConfig, *, seed: int, most_item_bytes: int = MOST_BYTES) -> list[Source]:
    """Load the sources of the train split, in the config's order; `most_item_bytes` bounds an item on the wire.

    Raises:
        DataError: data cannot be read, a source has no items, or an item cannot be sent to the workers.
    """
    seen: set[str] = set()
    if data.deduplicate:
        for key, held_out in eval_sources(data):  # the full sets, even if num_prompts limits the evaluation
            seen |= {_key(item) for item in _items(key, make_task(key, held_out, seed=seed), held_out, "eval")}
    sources = []
    for key, config in data.keyed_train_sources:
        items, examples = _items_and_examples(key, config, data, "train", seed)
        kept = _first_ones(items, seen) if data.deduplicate else items
        if not kept:
            raise DataError(f"{key}: no items are left without the duplicates")
        num_duplicates = len(items) - len(kept)
        prepared = _prepared(key, config, kept, examples, most_item_bytes)
        sources.append(Source(config.label, prepared, weight=config.weight, num_duplicates=num_duplicates))
        if num_duplicates:
            logger.info("%s: removed %d of %d prompts as duplicates", config.label, num_duplicates, len(items))
    return sources


def load_eval(data: DataConfig, *, seed: int, most_item_bytes: int = MOST_BYTES) -> list[Source]:
    """Load the evaluation sets, in the config's order; none if evaluation is off.

    Raises:
        DataError: as `load_train`.
    """
    sources = []
    for key, config in eval_sources(data):
        items, examples = _items_and_examples(key, config, data, "eval", seed)
        sources.append(Source(config.label, _prepared(key, config, items, examples, most_item_bytes)))
    return sources


def eval_sources(data: DataConfig) -> list[tuple[str, EvalSourceConfig]]:
    """Return the evaluation sets, each with its key in the config, and with their files filled in."""
    return [(key, _with_test_file(key, source, data.train_sources)) for key, source in data.keyed_eval_sources]


def check_data(data: DataConfig, *, most_item_bytes: int = MOST_BYTES) -> Looked:
    """Check tasks and their parameters, files, and the items; return the items looked at.

    Files larger than `_READ_BYTES` and datasets of the hub are not read; the learner checks all items.

    Raises:
        DataError: a task or a file is wrong.
        ConfigError: an import path is wrong.
    """
    # The train files first: a missing train file has no test file beside it either.
    trains = _check_sources(data.keyed_train_sources, "train", most_item_bytes)
    return trains | _check_sources(eval_sources(data), "eval", most_item_bytes)


def hub_datasets(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Give the config key and the name of each dataset that the hub must have."""
    splits: dict[Split, Sequence[tuple[str, ConfiguredSource]]]
    splits = {"train": data.keyed_train_sources, "eval": eval_sources(data)}
    for split, sources in splits.items():
        for key, source in sources:
            task = make_task(key, source, seed=0)
            if source.path is None and isinstance(task, RowTask) and (name := task.dataset(split)) is not None:
                yield f"{key}.{'hub' if source.hub else 'path'}", name


def _no_file(path: str) -> str:
    """Say from which folder a relative path is read: that of this program, not that of the run."""
    return "no such file" if Path(path).is_absolute() else f"no such file, seen from {Path.cwd()}"


def _check_sources(sources: Sequence[tuple[str, ConfiguredSource]], split: Split, most_bytes: int) -> Looked:
    looked: Looked = {}
    for key, source in sources:
        task = make_task(key, source, seed=0)
        examples = source.few_shot.path if source.few_shot is not None else None
        for name, path in (("path", source.path), ("few_shot.path", examples)):
            if path is not None and not Path(path).is_file():
                is_folder = Path(path).is_dir()
                raise DataError(
                    f"{key}.{name}: {path}: {'expected a file, got a folder' if is_folder else _no_file(path)}"
                )
        if _is_looked_at(source, task):
            items = _items(key, task, source, split)
            prepared = _prepared(key, source, items, (), most_bytes)
            looked[split, source.label] = items if isinstance(items, list) else _some_of(prepared)
            if ":" in source.task:
                _check_same_again(key, source, split, items)
    return looked


def _is_looked_at(source: ConfiguredSource, task: Task) -> bool:
    """Return True for a small file, and for items that the task makes."""
    if source.path is not None:
        return Path(source.path).stat().st_size <= _READ_BYTES
    return not isinstance(task, RowTask)


def _items(key: str, task: Task, source: ConfiguredSource, split: Split) -> Sequence[Item]:
    """Return the items of a task, which may be the user's code: a list checked now, or else items checked when made."""
    with _users_code(key, "the items cannot be made"):
        items = task.items(split)
        if not isinstance(items, Sized):
            expected = f"expected a list of items, or another sequence, from {source.task}.items('{split}')"
            raise DataError(f"{key}: {expected}, got {type(items).__name__}")
        num = len(items)
    if not num:
        raise DataError(f"{key}: expected items from {source.task}.items('{split}'), got none")

    def item(index: int) -> Item:
        place = f"item {index + 1}"
        with _users_code(key, f"{place} cannot be made"):
            made = items[index]
        if not isinstance(made, Item):
            got = type(made).__name__
            raise DataError(f"{key}: {place}: expected an areal_rloo.tasks.Item, got {got}")
        with _users_code(key, f"{place}: expected a text or messages as the prompt"):
            text = made.text  # reads every message
        if not text:
            raise DataError(f"{key}: {place}: expected a prompt, got an empty text")
        if not isinstance(made.answer, str):
            raise DataError(f"{key}: {place}: expected a text as the answer, got {type(made.answer).__name__}")
        return made

    checked = LazyItems(num, item)
    return list(checked) if isinstance(items, list | tuple) else checked


def _check_same_again(key: str, source: ConfiguredSource, split: Split, items: Sequence[Item]) -> None:
    """Make the items of a user's task once more: after a restart, the learner goes on in the same order."""
    again = _items(key, make_task(key, source, seed=0), source, split)
    if Source(source.label, again).description != Source(source.label, items).description:
        raise DataError(
            f"{key}: expected the same items from every call of {source.task}.items('{split}'), in the same order, got "
            "others; draw random items with the seed that the task is given"
        )


def _some_of(items: Sequence[Item]) -> list[Item]:
    places = {(len(items) - 1) * part // _PARTS: None for part in range(_PARTS + 1)}
    return [items[place] for place in places]


@contextmanager
def _options_of(key: str) -> Iterator[None]:
    """Put the key of a source before the option that a task refuses."""
    try:
        yield
    except SourceError as error:
        raise DataError(f"{key}.{error}", absent=error.absent) from error


@contextmanager
def _users_code(key: str, words: str) -> Iterator[None]:
    """Turn any exception of a user's task into a DataError."""
    try:
        with _options_of(key):
            yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{key}: {words}: {raised(error)}") from error


def _with_test_file(key: str, source: EvalSourceConfig, trains: Sequence[SourceConfig]) -> EvalSourceConfig:
    if source.path is not None or source.hub is not None:
        return source
    train = next((train for train in trains if train.task == source.task and train.path is not None), None)
    if train is None or train.path is None:
        return source
    beside = Path(train.path).with_name(f"test{Path(train.path).suffix}")
    if not beside.is_file():
        raise DataError(f"{key}.path: expected a file, or {beside} beside the train file; or set data.eval=null")
    return msgspec.structs.replace(source, path=str(beside), fields=source.fields or train.fields)


def _items_and_examples(
    key: str, source: ConfiguredSource, data: DataConfig, split: Split, seed: int
) -> tuple[Sequence[Item], list[tuple[Item, str]]]:
    """Return the items of a source without the few-shot examples, and the examples with completions."""
    task = make_task(key, source, seed=seed)
    items = _items(key, task, source, split)
    examples = _examples(key, source, data, task, seed)
    if examples:
        shown = {_key(item) for item, _ in examples}
        items = [item for item in items if _key(item) not in shown]
    if source.num_prompts is not None:
        items = items[: source.num_prompts]
    if not items:
        raise DataError(f"{key}: no items are left")
    return items, examples


def _examples(key: str, source: ConfiguredSource, data: DataConfig, task: Task, seed: int) -> list[tuple[Item, str]]:
    few_shot = source.few_shot
    if few_shot is None:
        return []
    if few_shot.path is not None:
        of: tuple[str, ConfiguredSource]
        of = f"{key}.few_shot", msgspec.structs.replace(source, path=few_shot.path, hub=None)
    else:
        of = next((train for train in data.keyed_train_sources if train[1].task == source.task), (key, source))
    pool = _items(of[0], make_task(*of, seed=seed), of[1], "train")
    if len(pool) < few_shot.num:
        most = f"at most {len(pool)} (all items)"
        raise DataError(f"{key}.few_shot.num: expected {most}, got {few_shot.num}")
    picked = random.Random(few_shot.seed).sample(range(len(pool)), few_shot.num)
    with _users_code(f"{key}.few_shot", "a demonstration cannot be made"):
        return [(pool[index], task.demonstration(pool[index])) for index in picked]


def _first_ones(items: Sequence[Item], seen: set[str]) -> Sequence[Item]:
    by_key: dict[str, Item] = {}
    for item in items:
        by_key.setdefault(_key(item), item)
    kept = [item for key, item in by_key.items() if key not in seen]
    seen.update(by_key)
    return kept


def _key(item: Item) -> str:
    """Identity of a prompt for deduplication: the text with normalised spaces."""
    return " ".join(item.text.split())


def _prepared(
    key: str, source: ConfiguredSource, items: Sequence[Item], examples: Collection[tuple[Item, str]], most_bytes: int
) -> Sequence[Item]:
    """Label the items, and put the examples before each. Check the items of a list now, and other items when made."""
    shown = [(*item.messages, Message("assistant", completion)) for item, completion in examples]
    before = tuple(itertools.chain(*shown))

    def prepare(index: int) -> Item:
        item = items[index]
        prompt = (*before, *item.messages) if before else item.prompt
        prepared = msgspec.structs.replace(item, prompt=prompt, source=source.label)
        place = "" if source.path is None else f"{source.path}: "
        where = f"{key}: {place}item {index + 1} ({item.text[:60]!r})"
        check_sendable(prepared, where, most_bytes)
        return prepared

    all_prepared = LazyItems(len(items), prepare)
    if isinstance(items, list | tuple):
        for _ in all_prepared:
            pass
    return all_prepared
