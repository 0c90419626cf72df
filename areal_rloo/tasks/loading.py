"""From the data section of a config to the sources of a split: items cut, freed of repeats, shown examples, labelled.

A file task whose evaluation names no data of its own takes the `test` file beside the train file of the same task.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_rloo.config import ConfiguredSource, DataConfig, EvalSourceConfig, SourceConfig
from areal_rloo.errors import DataError
from areal_rloo.tasks.base import Item, Message, Split, Task
from areal_rloo.tasks.lazy import LazyItems
from areal_rloo.tasks.registry import make_task
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)
C = TypeVar("C", bound=ConfiguredSource)


@dataclass(frozen=True, slots=True)
class Source:
    """The items of one source. `weight` is its share of a mixture; None where shares follow sizes."""

    label: str
    items: Sequence[Item]
    weight: float | None = None
    num_duplicates: int = 0


def load_train(data: DataConfig, *, seed: int) -> list[Source]:
    """The sources of the train split, in the config's order.

    Raises:
        DataError: data cannot be read, or a source holds no item.
    """
    seen: set[str] = set()
    if data.deduplicate:
        for held_out in eval_sources(data):  # all of it, also where only the first prompts are measured
            seen |= {_bare(item) for item in make_task(held_out, seed=seed).items("eval")}
    sources = []
    for config in data.train_sources:
        items, examples = _items_and_examples(config, data, "train", seed)
        num_all = len(items)
        if data.deduplicate:
            items = _first_ones(items, seen)
        sources.append(
            Source(
                config.label,
                _prepared(items, config, examples),
                weight=config.weight,
                num_duplicates=num_all - len(items),
            )
        )
        if num_all > len(items):
            logger.info("%s: %d of %d prompts are left out as repeats", config.label, num_all - len(items), num_all)
    return sources


def load_eval(data: DataConfig, *, seed: int) -> list[Source]:
    """The evaluation sets, in the config's order; none where evaluation is switched off.

    Raises:
        DataError: as `load_train`.
    """
    sources = []
    for config in eval_sources(data):
        items, examples = _items_and_examples(config, data, "eval", seed)
        sources.append(Source(config.label, _prepared(items, config, examples)))
    return sources


def eval_sources(data: DataConfig) -> list[EvalSourceConfig]:
    """The evaluation sets, each with the file it reads."""
    return [_with_test_file(source, data.train_sources) for source in data.eval_sources]


def _with_test_file(source: EvalSourceConfig, trains: Sequence[SourceConfig]) -> EvalSourceConfig:
    if source.path is not None or source.hub is not None:
        return source
    train = next((train for train in trains if train.task == source.task and train.path is not None), None)
    if train is None or train.path is None:
        return source
    beside = Path(train.path).with_name(f"test{Path(train.path).suffix}")
    if not beside.is_file():
        raise DataError(f"data.eval.path: expected a file, or {beside} beside the train file; or set data.eval=null")
    return msgspec.structs.replace(source, path=str(beside), fields=source.fields or train.fields)


def _items_and_examples(
    source: ConfiguredSource, data: DataConfig, split: Split, seed: int
) -> tuple[Sequence[Item], list[tuple[Item, str]]]:
    """The items of a source, without those it shows as examples, and the examples with their completions."""
    task = make_task(source, seed=seed)
    items = task.items(split)
    examples = _examples(source, data, task, seed)
    if examples:
        shown = {_bare(item) for item, _ in examples}
        items = [item for item in items if _bare(item) not in shown]
    if source.num_prompts is not None:
        items = items[: source.num_prompts]
    if not items:
        raise DataError(f"data.{split}: {source.label}: no item is left")
    return items, examples


def _examples(source: ConfiguredSource, data: DataConfig, task: Task, seed: int) -> list[tuple[Item, str]]:
    few_shot = source.few_shot
    if few_shot is None:
        return []
    if few_shot.path is not None:
        where: ConfiguredSource = msgspec.structs.replace(source, path=few_shot.path, hub=None)
    else:
        where = next((train for train in data.train_sources if train.task == source.task), source)
    pool = make_task(where, seed=seed).items("train")
    if len(pool) < few_shot.num:
        raise DataError(f"data: {source.label}: few_shot.num: expected at most the {len(pool)} items there are")
    picked = random.Random(few_shot.seed).sample(range(len(pool)), few_shot.num)
    return [(pool[index], task.demonstration(pool[index])) for index in picked]


def _first_ones(items: Sequence[Item], seen: set[str]) -> Sequence[Item]:
    kept = []
    for item in items:
        bare = _bare(item)
        if bare not in seen:
            seen.add(bare)
            kept.append(item)
    return kept


def _bare(item: Item) -> str:
    """What makes two prompts the same: their text, however it is spaced."""
    return " ".join(item.text.split())


def _prepared(
    items: Sequence[Item], source: ConfiguredSource, examples: Collection[tuple[Item, str]]
) -> Sequence[Item]:
    label = source.label
    before = tuple(
        message for item, completion in examples for message in (*item.messages, Message("assistant", completion))
    )

    def prepare(item: Item) -> Item:
        prompt = (*before, *item.messages) if before else item.prompt
        prepared = msgspec.structs.replace(item, prompt=prompt, source=label)
        try:
            msgspec.msgpack.encode(prepared)  # as it travels to the workers, where it is too late to say so
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"data: {label}: the item {item.text[:60]!r}: expected fields that JSON can say, got one that "
                f"cannot be sent: {error}"
            ) from error
        return prepared

    return LazyItems(len(items), lambda index: prepare(items[index]))
