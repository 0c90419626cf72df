"""Each alert fires for its cause alone, none in a healthy run, and none after the end of a run; by promtool."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
RULES = REPO / "launcher" / "monitoring" / "prometheus" / "alerts.yml"

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: install prometheus")

_INTERVAL_S, _EVALUATION_S = 15, 45  # in a run, both 15; bursts repeat after 60: each phase has its turn
_MINUTES = 120
_NUM = _MINUTES * 60 // _INTERVAL_S
_LEARNER, _WORKER = 'run="a",process="learner"', 'run="a",process="rollout-0"'
P = "areal_rloo_"

# A healthy run with a train step every 15 s: series without its labels, labels, values.
HEALTHY: dict[str, tuple[str, str]] = {
    'up{job="areal_rloo",': (_LEARNER, f"1x{_NUM}"),
    'up{job="areal_rloo", ': (_WORKER, f"1x{_NUM}"),
    P + "last_train_step_timestamp_seconds{": (_LEARNER, f"0+15x{_NUM}"),
    P + "long_train_step_seconds{": (_LEARNER, f"16x{_NUM}"),
    P + "train_steps_left{": (_LEARNER, f"50x{_NUM}"),
    P + "policy_version{": (_LEARNER, f"0+1x{_NUM}"),
    P + "checkpoint_newest_version{": (_LEARNER, " ".join(f"{25 * ((n - 2) // 25)}" for n in range(_NUM + 1))),
    P + "checkpoint_every_n_steps{": (_LEARNER, f"25x{_NUM}"),
    P + "checkpoint_newest_bytes{": (_LEARNER, f"3e9x{_NUM}"),
    P + 'reward_num_at_once{runner="processes",': (_WORKER, f"2x{_NUM}"),
    P + 'reward_num_at_once{runner="async",': (_WORKER, f"64x{_NUM}"),
    P + 'reward_num_at_once{runner="data.train.rewards.0.model",': (_WORKER, f"16x{_NUM}"),
    P + 'reward_num_queued{runner="processes",': (_WORKER, "0 0 0 40 " * (_NUM // 4)),  # bursts
    P + 'reward_num_queued{runner="async",': (_WORKER, f"10x{_NUM}"),  # always some, and few
    P + 'reward_num_queued{runner="data.train.rewards.0.model",': (_WORKER, f"3x{_NUM}"),
    P + 'launcher_restarts_total{restarted="rollout-1",': (_LEARNER, f"0x{_NUM}"),
    P + "staleness_max{": (_LEARNER, f"1x{_NUM}"),
    P + "generated_tokens_total{": (_LEARNER, f"0+900x{_NUM}"),
    P + "fleet_num_workers{": (_LEARNER, f"1x{_NUM}"),
    P + "launcher_num_workers{": (_LEARNER, f"1x{_NUM}"),
    P + 'idle_share{half="learner",': (_LEARNER, f"0.1x{_NUM}"),
    P + "engine_idle_seconds_total{": (_WORKER, f"0+6x{_NUM}"),
    P + "mismatch_abs_mean{": (_LEARNER, f"0.001x{_NUM}"),
    P + "ledger_admitted_total{": (_LEARNER, f"0+100x{_NUM}"),
    P + "ledger_in_flight{": (_LEARNER, f"900x{_NUM}"),
    P + "ledger_buffered{": (_LEARNER, f"100x{_NUM}"),
    P + 'ledger_dropped_total{reason="stale",': (_LEARNER, f"0+1x{_NUM}"),
    P + 'ledger_dropped_total{reason="reward_error",': (_LEARNER, f"0x{_NUM}"),
    P + "run_folder_free_bytes{": (_LEARNER, f"5e10x{_NUM}"),
    P + 'run_info{code="one",': (_LEARNER, f"1x{_NUM}"),
    P + 'run_info{code="one", ': (_WORKER, f"1x{_NUM}"),
    P + 'run_info{code="two", ': (_WORKER, f"_x{_NUM}"),
    P + "behaviour_kl_k3{": (_LEARNER, f"0.01x{_NUM}"),
    P + "zero_variance_group_share{": (_LEARNER, f"0.7x{_NUM}"),
    P + 'memory_bytes{of="process",': (_LEARNER, f"5e9x{_NUM}"),
    P + 'memory_bytes{of="started",': (_LEARNER, f"5e9x{_NUM}"),
    'process_start_time_seconds{job="areal_rloo",instance="h:1",': (_LEARNER, f"1x{_NUM}"),
    **{
        f'process_start_time_seconds{{job="areal_rloo",instance="h:{port}",': (_WORKER, f"{port}x{_NUM}")
        for port in (2, 3)  # restarted once
    },
    **{f'process_start_time_seconds{{job="areal_rloo",instance="h:{port}",': (_WORKER, f"_x{_NUM}") for port in (4, 5)},
    P + 'ledger_dropped_total{reason="low_reward_std",': (_LEARNER, f"0+100x{_NUM}"),
    P + 'symptom{symptom="no_signal",': (_LEARNER, f"0x{_NUM}"),
    **{
        P + name: (_LEARNER, f"0x{_NUM}")
        for name in (
            *("ledger_imbalance{", "skipped_steps_total{", "failed_checkpoints_total{", "watchdog_hangs_total{"),
            *("turn_missed_total{", "weights_missing_memory_bytes{", 'evaluation_num_failed{set="x",'),
            *("masked_token_share{", "behaviour_weight_clamped_share{", "behaviour_weight_masked_share{"),
            *("wire_refused_total{", "intake_cut_off_total{", "fleet_set_aside_total{", "weights_failures_total{"),
            "weights_left_out_total{",
        )
    },
    **{
        P + f"engine_server_{name}_total{{": (_WORKER, f"0x{_NUM}")
        for name in ("restarts", "weight_mismatches", "unproven_updates")
    },
}

_AT_38_MIN = f"0x151 1+0x{_NUM - 152}"  # grows once, two minutes before the look
_FROM_10_MIN = f"0x39 0+1x{_NUM - 40}"
CAUSES: dict[str, dict[str, str]] = {
    "LedgerUnbalanced": {P + "ledger_imbalance{": f"1x{_NUM}"},
    "Unhealthy": {P + 'symptom{symptom="no_signal",': f"1x{_NUM}"},
    # The learner stands still: its gauges do, too. An idle engine is no reason to use fewer workers then.
    "NoTrainStep": {
        P + "last_train_step_timestamp_seconds{": f"0+15x79 1200x{_NUM - 80}",
        P + "engine_idle_seconds_total{": f"0+6x79 0+15x{_NUM - 80}",
    },
    "TargetDown": {'up{job="areal_rloo", ': f"1x139 0x{_NUM - 140}"},
    "WorkerMissing": {P + "launcher_num_workers{": f"2x{_NUM}"},
    "RestartLoop": {
        f'process_start_time_seconds{{job="areal_rloo",instance="h:{port}",': f"_x99 {port}x9 _x{_NUM - 110}"
        for port in (4, 5)
    },
    "MemoryGrows": {P + 'memory_bytes{of="process",': f"5e9x360 8e9x{_NUM - 361}"},
    "DiskFull": {P + "run_folder_free_bytes{": f"5e8x{_NUM}"},
    "CodeDiffers": {P + 'run_info{code="one", ': f"_x{_NUM}", P + 'run_info{code="two", ': f"1x{_NUM}"},
    "PolicyFarFromBehaviour": {P + "behaviour_kl_k3{": f"2x{_NUM}"},
    "EqualRewards": {P + "zero_variance_group_share{": f"0.95x{_NUM}"},
    "NoRolloutWorker": {P + "fleet_num_workers{": f"1x98 0x{_NUM - 99}"},
    "StepsSkipped": {P + "skipped_steps_total{": _AT_38_MIN},
    "CheckpointNotWritten": {P + "failed_checkpoints_total{": _AT_38_MIN},
    "CheckpointOld": {P + "checkpoint_newest_version{": f"25x{_NUM}"},
    "LearnerStarved": {
        P + 'idle_share{half="learner",': f"0.9x{_NUM}",
        P + "engine_idle_seconds_total{": f"0+1x{_NUM}",
    },
    "RewardsSaturated": {P + 'reward_num_queued{runner="processes",': f"3x{_NUM}"},
    "Hang": {P + "watchdog_hangs_total{": _AT_38_MIN},
    "TurnMissed": {P + "turn_missed_total{": _AT_38_MIN},
    "SharedMemoryFull": {P + "weights_missing_memory_bytes{": f"1000x{_NUM}"},
    "EvaluationSamplesFailed": {P + 'evaluation_num_failed{set="x",': f"3x{_NUM}"},
    "TokensPastTheBound": {P + "masked_token_share{": f"0.2x{_NUM}"},
    "BehaviourWeightLimited": {P + "behaviour_weight_masked_share{": f"0.1x{_NUM}"},
    "TrainInferenceMismatch": {P + "mismatch_abs_mean{": f"0.1x{_NUM}"},
    "EngineServerRestarts": {P + "engine_server_restarts_total{": f"0x99 0+0.1x{_NUM - 100}"},
    "EngineServerWeights": {P + "engine_server_weight_mismatches_total{": _AT_38_MIN},
    "EngineServerUnproven": {P + "engine_server_unproven_updates_total{": _AT_38_MIN},
    "RolloutIdle": {P + "engine_idle_seconds_total{": f"0+12x{_NUM}"},
    "SamplesDropped": {P + 'ledger_dropped_total{reason="stale",': f"0+8x{_NUM}"},
    "MessagesRefused": {P + "wire_refused_total{": _AT_38_MIN},
    "WorkerCutOff": {P + "intake_cut_off_total{": _AT_38_MIN},
    "WorkerSetAside": {P + "fleet_set_aside_total{": _AT_38_MIN},
    "WeightsDoNotArrive": {P + "weights_failures_total{": _AT_38_MIN},
}


def _series(changes: Mapping[str, str], *, until_min: int = _MINUTES) -> list[dict[str, str]]:
    """Give the series of a run; they end when the run does and Prometheus has forgotten its targets."""
    series = []
    for name, (labels, values) in HEALTHY.items():
        written = _expanded(changes.get(name, values))[: until_min * 60 // _INTERVAL_S]
        ended = " stale" if until_min < _MINUTES else ""
        series.append({"series": f"{name}{labels}}}", "values": " ".join(written) + ended})
    return series


def _expanded(values: str) -> list[str]:
    """Write `A+BxN` and `AxN` as single numbers, N + 1 for each part, as promtool does."""
    numbers: list[str] = []
    for part in values.split():
        number, _, times = part.partition("x")
        if number == "_":  # no sample
            numbers += ["_"] * (int(times) + 1)
            continue
        start, _, step = number.partition("+")
        numbers += [f"{float(start) + float(step or 0) * index:g}" for index in range(int(times or 0) + 1)]
    return numbers


def _fires(series: list[dict[str, str]], at_min: int, alerts: set[str], name: str) -> dict[str, Any]:
    samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)]
    look = {
        "expr": 'max by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{at_min}m",
        "exp_samples": samples,
    }
    return {"name": name, "interval": f"{_INTERVAL_S}s", "input_series": series, "promql_expr_test": [look]}


def _run(tests: list[dict[str, Any]], folder: Path) -> str:
    """Run the tests; give the output, empty if all passed."""
    file = folder / "tests.yml"
    rules = {"rule_files": [str(RULES)], "evaluation_interval": f"{_EVALUATION_S}s", "tests": tests}
    file.write_text(yaml.safe_dump(rules))
    ended = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


@pytest.mark.parametrize(("gigabytes_an_hour", "fires"), [(2, True), (8, True), (0.5, False), (-2, False)])
@pytest.mark.parametrize("gigabytes", [20, 90])
def test_a_slow_leak_of_a_large_process_is_seen(
    gigabytes: int, gigabytes_an_hour: float, fires: bool, tmp_path: Path
) -> None:
    """The memory never grows by half within an hour."""
    hours, start = 4, gigabytes * 1e9
    step, num = gigabytes_an_hour * 1e9 * _INTERVAL_S / 3600, hours * 3600 // _INTERVAL_S
    series = {
        'process_start_time_seconds{job="areal_rloo",': "0",
        'up{job="areal_rloo",': "1",
        P + 'memory_bytes{of="process",': f"{start:.0f}{step:+.0f}",
    }
    given = [{"series": f"{name}{_LEARNER}}}", "values": f"{values}x{num}"} for name, values in series.items()]
    alerts = {"MemoryGrows"} if fires else set()
    assert _run([_fires(given, 60 * hours, alerts, "leak")], tmp_path) == ""


def test_every_alert_has_a_cause() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert {rule["alert"] for group in groups for rule in group["rules"]} == set(CAUSES)
    assert {name for changes in CAUSES.values() for name in changes} <= set(HEALTHY)


@pytest.mark.parametrize("alert", CAUSES)
def test_an_alert_fires_for_its_cause_alone(alert: str, tmp_path: Path) -> None:
    at_min = 118 if alert == "MemoryGrows" else 40  # it compares with an hour ago
    assert _run([_fires(_series(CAUSES[alert]), at_min, {alert}, alert)], tmp_path) == ""


def test_no_alert_fires_in_a_healthy_run(tmp_path: Path) -> None:
    tests = [_fires(_series({}), at_min, set(), f"at {at_min} min") for at_min in (1, 6, 20, 40, 59, 119)]
    assert _run(tests, tmp_path) == ""


def test_no_alert_fires_in_a_run_with_slow_steps(tmp_path: Path) -> None:
    """A step of 22 minutes is healthy if all are so long."""
    slow = {
        P + "last_train_step_timestamp_seconds{": " ".join(f"{1320 * (n * 15 // 1320)}" for n in range(_NUM + 1)),
        P + "long_train_step_seconds{": f"1330x{_NUM}",
    }
    assert _run([_fires(_series(slow), at_min, set(), f"at {at_min} min") for at_min in (21, 43, 59)], tmp_path) == ""


def test_a_first_step_may_generate_for_an_hour(tmp_path: Path) -> None:
    """What a long step is, only a step tells. Without tokens, nothing goes on."""
    first = {
        P + "policy_version{": f"0x{_NUM}",
        P + "last_train_step_timestamp_seconds{": f"0x{_NUM}",
        P + "long_train_step_seconds{": f"360x{_NUM}",
        P + "checkpoint_newest_version{": f"0x{_NUM}",
    }
    stopped = first | {P + "generated_tokens_total{": f"0+900x159 143100x{_NUM - 160}"}  # at 40 min
    asked = [_fires(_series(first), at_min, set(), f"at {at_min} min") for at_min in (29, 31, 60, 119)]
    asked.append(_fires(_series(stopped), 55, {"NoTrainStep"}, "without tokens"))
    assert _run(asked, tmp_path) == ""


def test_workers_of_a_synchronous_run_may_idle(tmp_path: Path) -> None:
    """Both halves wait for each other, so fewer workers would only slow the run down."""
    idle = P + 'idle_share{half="learner",'
    synchronous = {P + "engine_idle_seconds_total{": f"0+10x{_NUM}", idle: f"0.6x{_NUM}"}
    assert _run([_fires(_series(synchronous), 40, set(), "at 40 min")], tmp_path) == ""
    long_steps = {P + "engine_idle_seconds_total{": f"0+12x{_NUM}", P + "staleness_max{": f"0x{_NUM}"}
    assert _run([_fires(_series(long_steps), 40, set(), "with a learner that is busy")], tmp_path) == ""


@pytest.mark.parametrize("symptom", ["nothing_trained", "no_signal", "no_gradient"])
def test_more_workers_are_no_remedy_for_a_run_that_learns_nothing(symptom: str, tmp_path: Path) -> None:
    """Without a gradient the learner has little to compute, and waits."""
    healthy = [one for one in _series(CAUSES["LearnerStarved"]) if f"{P}symptom{{" not in one["series"]]
    series = [*healthy, {"series": f'{P}symptom{{symptom="{symptom}",{_LEARNER}}}', "values": f"1x{_NUM}"}]
    assert _run([_fires(series, 60, {"Unhealthy"}, symptom)], tmp_path) == ""


def test_drops_of_slow_steps_are_seen(tmp_path: Path) -> None:
    """The counters change once a step, which takes 22 minutes."""
    steps = [n * 15 // 1320 for n in range(_NUM + 1)]
    slow = {
        P + "last_train_step_timestamp_seconds{": " ".join(f"{1320 * step}" for step in steps),
        P + "long_train_step_seconds{": f"1330x{_NUM}",
        P + "ledger_admitted_total{": " ".join(f"{1000 * step}" for step in steps),
        P + 'ledger_dropped_total{reason="stale",': " ".join(f"{500 * step}" for step in steps),
    }
    assert _run([_fires(_series(slow), at, {"SamplesDropped"}, f"at {at} min") for at in (70, 100)], tmp_path) == ""


def test_a_symptom_that_comes_and_goes_is_one_alarm(tmp_path: Path) -> None:
    flaps = {P + 'symptom{symptom="no_signal",': " ".join(["1x1 0x5"] * 60)}
    tests = [_fires(_series(flaps), at_min, {"Unhealthy"}, f"at {at_min} min") for at_min in (9, 10, 11, 12)]
    assert _run(tests, tmp_path) == ""


def test_a_lost_worker_needs_a_person_less_than_a_lost_learner(tmp_path: Path) -> None:
    for labels, severity in ((_WORKER, "warning"), (_LEARNER, "critical")):
        down = {name: f"1x139 0x{_NUM - 140}" for name, (of, _) in HEALTHY.items() if name[:2] == "up" and of == labels}
        look = _fires(_series(down), 40, {"TargetDown"}, severity)
        found = f'ALERTS{{alertname="TargetDown",severity="{severity}"}}'
        look["promql_expr_test"][0]["expr"] = f"max by (alertname) ({found})"
        assert _run([look], tmp_path) == ""


def test_a_disk_without_room_for_a_checkpoint_is_full(tmp_path: Path) -> None:
    large = {P + "checkpoint_newest_bytes{": f"6e10x{_NUM}"}
    assert _run([_fires(_series(large), 40, {"DiskFull"}, "at 40 min")], tmp_path) == ""


def test_a_run_without_checkpoints_has_no_old_one(tmp_path: Path) -> None:
    none = {P + "checkpoint_newest_version{": f"0x{_NUM}", P + "checkpoint_every_n_steps{": f"0x{_NUM}"}
    assert _run([_fires(_series(none), 40, set(), "at 40 min")], tmp_path) == ""


def test_memory_that_jumps_after_the_start_is_no_growth(tmp_path: Path) -> None:
    """The first step allocates gradients and moments, minutes after the process serves metrics."""
    jumps = {P + 'memory_bytes{of="started",': f"3e9x47 9e9x{_NUM - 48}"}
    assert _run([_fires(_series(jumps), at_min, set(), f"at {at_min} min") for at_min in (61, 71, 119)], tmp_path) == ""


def test_a_process_with_a_fixed_port_has_a_restart_loop_too(tmp_path: Path) -> None:
    series = 'process_start_time_seconds{job="areal_rloo",instance="h:1",'
    restarts = {series: " ".join(f"{number}x15" for number in range(1, 12))}
    assert _run([_fires(_series(restarts), 40, {"RestartLoop"}, "at 40 min")], tmp_path) == ""


@pytest.mark.parametrize("fixed_port", [True, False])
@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_resumes_by_a_person_are_no_restart_loop(restarts: int, fixed_port: bool, tmp_path: Path) -> None:
    """Three starts of the run in half an hour, and restarts by the launcher in the last of them."""
    starts = [0, 100, 200, *range(300, 300 + 100 * restarts, 100)]  # of the learner
    launches = [min(start, 200) for start in starts]  # the launcher of each
    series = []
    for name, numbers in (("process_start_time_seconds", starts), (P + "launcher_start_timestamp_seconds", launches)):
        lives = [f"{number + 1}x9" for number in numbers]
        before = [" ".join(f"_x{9}" for _ in range(place)) for place in range(len(lives))]
        for place, values in enumerate(
            [" ".join(lives)] if fixed_port else map(" ".join, zip(before, lives, strict=True))
        ):
            labels = f'job="areal_rloo",instance="h:{place}",{_LEARNER}'
            series.append(
                {"series": f"{name}{{{labels}}}", "values": values + " _" * (fixed_port or place + 1 < len(lives))}
            )
    series.append({"series": f'up{{job="areal_rloo",{_LEARNER}}}', "values": "1x200"})
    at_min = 10 * len(starts) * _INTERVAL_S // 60 - 1
    alerts = {"RestartLoop"} if restarts == 2 else set()
    assert _run([_fires(series, at_min, alerts, f"{restarts} restarts")], tmp_path) == ""


def test_a_learner_has_a_restart_loop_before_its_last_restart(tmp_path: Path) -> None:
    """It may restart twice (`launcher.max_learner_restarts`): then the run ends."""
    series = 'process_start_time_seconds{job="areal_rloo",instance="h:1",'
    once, twice = ({series: f"1x110 2x9 {second}x{_NUM - 121}"} for second in (2, 3))
    asked = [_fires(_series(once), 40, set(), "once"), _fires(_series(twice), 40, {"RestartLoop"}, "twice")]
    assert _run(asked, tmp_path) == ""


def test_a_worker_that_dies_before_it_serves_metrics_has_a_restart_loop(tmp_path: Path) -> None:
    restarts = {P + 'launcher_restarts_total{restarted="rollout-1",': f"0x100 1x9 2x9 3x{_NUM}"}
    assert _run([_fires(_series(restarts), 40, {"RestartLoop"}, "at 40 min")], tmp_path) == ""


@pytest.mark.parametrize("runner", ["processes", "async", "data.train.rewards.0.model"])
def test_a_saturated_runner_is_not_hidden_by_the_room_of_another(runner: str, tmp_path: Path) -> None:
    queued = {P + f'reward_num_queued{{runner="{runner}",': f"20x{_NUM}"}
    assert _run([_fires(_series(queued), 40, {"RewardsSaturated"}, runner)], tmp_path) == ""


def test_a_runner_without_a_process_is_not_saturated(tmp_path: Path) -> None:
    """More processes would not start either; the drops have an alarm of their own."""
    broken = {
        P + f'reward_num_{of}{{runner="processes",': f"{number}x{_NUM}"
        for of, number in (("at_once", 0), ("queued", 5))
    }
    assert _run([_fires(_series(broken), 40, set(), "no process")], tmp_path) == ""


def test_small_drops_for_several_reasons_add_up(tmp_path: Path) -> None:
    """Each is below the limit; `reason` says so."""
    several = {P + f'ledger_dropped_total{{reason="{reason}",': f"0+4x{_NUM}" for reason in ("stale", "reward_error")}
    look = _fires(_series(several), 40, {"SamplesDropped"}, "together")
    look["promql_expr_test"][0]["expr"] = 'max by (alertname) (ALERTS{reason="several reasons together"})'
    assert _run([_fires(_series(several), 40, {"SamplesDropped"}, "alone"), look], tmp_path) == ""


def test_one_drop_in_a_slow_first_step_is_a_small_share(tmp_path: Path) -> None:
    """All samples of the step are admitted before the first scrape, so the counter does not grow."""
    slow = {
        P + "ledger_admitted_total{": f"1024x{_NUM}",
        P + 'ledger_dropped_total{reason="stale",': f"0x19 1x{_NUM - 20}",
    }
    assert _run([_fires(_series(slow), at_min, set(), f"at {at_min} min") for at_min in (16, 29)], tmp_path) == ""


def _of_another_folder(series: list[dict[str, str]]) -> list[dict[str, str]]:
    """Give the series of a run of other code, whose folder has the same name."""
    renamed = [one["series"].replace('run="a"', 'run="a",run_id="2"').replace('code="', 'code="3') for one in series]
    return [{**one, "series": name} for one, name in zip(series, renamed, strict=True)]


def test_no_alert_fires_in_two_healthy_runs_with_equal_names(tmp_path: Path) -> None:
    both = [*_series({}), *_of_another_folder(_series({}))]
    assert _run([_fires(both, at_min, set(), f"at {at_min} min") for at_min in (6, 40, 119)], tmp_path) == ""


@pytest.mark.parametrize("alert", ["WorkerMissing", "RestartLoop", "DiskFull", "CodeDiffers", "SamplesDropped"])
def test_runs_with_equal_names_are_watched(alert: str, tmp_path: Path) -> None:
    """Folders can have equal names; a rule that mixes or refuses these would watch no run."""
    both = [*_series(CAUSES[alert]), *_of_another_folder(_series({}))]
    assert _run([_fires(both, 40, {alert}, alert)], tmp_path) == ""


def test_no_alert_fires_while_a_run_evaluates_after_its_last_step(tmp_path: Path) -> None:
    ended = {
        P + "last_train_step_timestamp_seconds{": f"0+15x79 1200x{_NUM - 80}",
        P + "train_steps_left{": f"1x79 0x{_NUM - 80}",
    }
    assert _run([_fires(_series(ended), 40, set(), "at 40 min")], tmp_path) == ""


def test_no_alert_fires_after_the_end_of_a_run(tmp_path: Path) -> None:
    """What went wrong in the last minutes is no alarm for an hour."""
    changes = {name: values for causes in CAUSES.values() for name, values in causes.items()}
    changes |= {P + "last_train_step_timestamp_seconds{": f"0+15x{_NUM}", 'up{job="areal_rloo", ': f"1x{_NUM}"}
    tests = [_fires(_series(changes, until_min=40), at_min, set(), f"at {at_min} min") for at_min in (41, 46, 59)]
    assert _run(tests, tmp_path) == ""
