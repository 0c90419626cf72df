"""docs/metrics.md is current, and a number of a train step is named in two files of the package at most."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.metric_names import all_metrics, metric_names

from areal_rloo.report.metrics_page import SERVED, metrics_page
from areal_rloo.telemetry.metric import PREFIX, Measured, declared_metrics
from areal_rloo.telemetry.records import EvalRecord, TrainRecord

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "areal_rloo"

# Names with more readers than the record and the code that computes the number: the terminal, the facts of the report,
# summary.json, checkpoints (totals of the run), or a word that means other things too.
READ_ELSEWHERE = {
    *("num_train_steps", "policy_version", "wall_s", "generated_tokens", "skipped_steps", "failed_checkpoints"),
    *("learner_idle_s", "rollout_idle_s", "staleness_tokens", "trained_tokens", "masked_token_share"),
    *("reward_mean", "reward_std", "reward_parts", "staleness_mean", "staleness_max", "trained_tokens_per_s"),
    *("num_workers", "filtered_prompts", "truncated_prompts", "ledger", "loss", "entropy", "kl_coefficient"),
    *("learning_rate", "times_s", "wait_s", "train_step_s", "completion_tokens_mean", "completion_tokens_std"),
    *("longest_of_group_mean", "idle_share", "rollout_busy_s", "decoding_s", "epoch"),
    *("policy_tokens", "steps_since_start", "completion_tokens_max"),
}
READERS = {PACKAGE / path for path in ("telemetry/health.py", "telemetry/trackers.py", "top/screen.py")}
SOURCES = {path: path.read_text(encoding="utf-8") for path in set(PACKAGE.rglob("*.py")) - READERS}
ROWS = [field.name for field in msgspec.structs.fields(TrainRecord) if field.name not in READ_ELSEWHERE]


def test_the_document_equals_the_declarations() -> None:
    written = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == metrics_page(), "run python -m areal_rloo.report.metrics_page > docs/metrics.md"


def test_more_than_35_step_numbers_are_in_the_document() -> None:
    assert len(ROWS) > 35


@pytest.mark.parametrize("field", ROWS)
def test_a_number_of_a_train_step_is_named_in_two_files_at_most(field: str) -> None:
    named = [str(path.relative_to(REPO)) for path, text in SOURCES.items() if re.search(rf"\b{field}\b", text)]
    assert len(named) == 2, named


def _fields(struct: type[Measured]) -> Iterator[str]:
    yield from (declared.path[0] for declared in declared_metrics(struct))


@pytest.mark.parametrize("struct", [TrainRecord, EvalRecord])
def test_every_field_of_a_record_is_a_metric(struct: type[Measured]) -> None:
    assert {field.name for field in msgspec.structs.fields(struct)} - {"name"} == set(_fields(struct))


@pytest.mark.parametrize("struct", [struct for _, struct in SERVED])
def test_a_metric_name_follows_from_its_field(struct: type[Measured]) -> None:
    for declared in declared_metrics(struct):
        spelled = declared.name.removeprefix(PREFIX + struct.metrics_prefix).removesuffix("_total")
        unspelled = re.sub(r"_seconds?$", "_s", spelled)
        assert unspelled == declared.field.replace(".", "_")
        assert declared.name.endswith("_total") == declared.is_counter


def test_every_name_is_unique_prefixed_and_in_base_units() -> None:
    assert len(metric_names()) == len(list(all_metrics()))
    for name in metric_names():
        assert re.fullmatch(r"areal_rloo_[a-z]+(_[a-z]+|_k1|_k3)*", name), name
        assert not name.endswith(("_s", "_ms", "_s_total", "_milliseconds", "_kb", "_mb", "_count")), name


def test_every_metric_has_a_help_text() -> None:
    for declared in all_metrics():
        assert len(declared.metric.help) > 8, declared.name
        assert not declared.metric.help.endswith("."), declared.name
