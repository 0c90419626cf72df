"""The command that advises on a split of the devices."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.measured_steps import measured_steps

from areal_rloo.config import dump_config, load_config
from areal_rloo.errors import UserError
from areal_rloo.launcher import advise
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.records import TrainRecord


@pytest.fixture
def make_run(tmp_path: Path, make_train_record: Callable[..., TrainRecord]) -> Callable[..., Path]:
    """Makes the folder of a run whose decode batches have this size."""

    def make(name: str, size: int, num_steps: int = 5, num_ranks: int = 1) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        counts = [f"rollout.num_slots={size}", f"learner.num_ranks={num_ranks}"]
        (folder / "config.yaml").write_text(dump_config(load_config("quickstart.yaml", counts)))
        file = MetricsFile(folder / "metrics.jsonl")
        for record in measured_steps(make_train_record, [size] * num_steps):
            file.append(record)
        file.close()
        return folder

    return make


def advice(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert advise.main(["--config", "quickstart.yaml", *arguments]) == 0
    return capsys.readouterr().out


def test_the_advice_has_speeds_forecasts_bottleneck_and_options(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run("run", 16)
    measured, configured, best, bottleneck, options, *hints = advice(
        capsys, f"--from={folder}", "--devices=8", "rollout.num_slots=16", "algorithm.max_staleness=4"
    ).splitlines()
    # A decode step of 16 takes 2.6 ms; a rank trains 15,360 tokens in 1.4 s.
    assert measured.startswith(f"measured in {folder}: a worker decodes 6,154 tokens/s in 16 slots")
    assert "a rank trains 10,971 tokens/s and needs 0.10 s a step more, a broadcast takes 0.20 s" in measured
    assert configured.startswith("as configured: learner ranks 1, workers 1, slots 16, max_staleness 4")
    assert best.startswith("best for 8 devices: learner ranks 3, workers 5, slots 16, max_staleness 4, pipeline_depth ")
    assert bottleneck.split(":")[0] in ("balanced", "rollout-bound", "learner-bound")
    assert options.startswith("options: learner.num_ranks=3 rollout.num_workers=5 algorithm.pipeline_depth=")
    assert [line.partition(", ")[0] for line in hints] == [
        "for advice on rollout.num_slots",
        "for the cost of the exchange between ranks",
    ]


def test_two_runs_with_other_slots_give_advice_on_slots(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [f"--from={make_run(name, size)}" for name, size in (("few", 16), ("many", 128))]
    text = advice(capsys, *runs, "--devices=3")
    assert "for advice on rollout.num_slots" not in text
    assert int(text.rpartition("rollout.num_slots=")[2].split()[0]) > 16, "a larger batch decodes faster"


def test_two_runs_with_other_ranks_show_the_cost_of_the_exchange(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks take as long as one here, so a second rank would bring nothing."""
    runs = [f"--from={make_run(name, 16, num_ranks=num)}" for name, num in (("one", 1), ("two", 2))]
    text = advice(capsys, *runs, "--devices=4", "rollout.num_slots=16")
    assert "a rank trains 10,971 tokens/s and needs 0.10 s a step more, several ranks need another 45.6 s for a" in text
    assert "options: learner.num_ranks=1 rollout.num_workers=3 " in text
    assert "exchange between ranks" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from=nowhere"], "nowhere: no run here .config.yaml is missing.; expected a run folder"),
        (["algorithm.group_size=4"], "algorithm.group_size: expected 8 as in .*, got 4"),
        (["--devices=1"], "expected enough for a rank and a worker, got 1"),
        (["--devices=0"], "expected enough for a rank and a worker, got 0"),
        (["rollout.share_devices=in_turns"], "rollout.share_devices: expected devices for each half, got in_turns"),
    ],
)
def test_mistakes_of_users_are_named(arguments: list[str], words: str, make_run: Callable[..., Path]) -> None:
    source = [] if arguments[0].startswith("--from") else [f"--from={make_run('run', 16)}"]
    with pytest.raises(UserError, match=words):
        advise.main(["--config", "quickstart.yaml", *source, *arguments])


def test_the_steps_before_a_restart_count_if_those_after_it_are_too_few(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run("run", 16, num_steps=8)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    first = advice(capsys, f"--from={folder}", "rollout.num_slots=16").splitlines()[0]
    for number, line in enumerate(lines[6:], start=1):
        after = {**json.loads(line), "steps_since_start": number, "train_step_s": 99.0}
        lines[5 + number] = json.dumps(after).encode()
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert advice(capsys, f"--from={folder}", "rollout.num_slots=16").splitlines()[0] == first


def test_more_devices_than_a_run_takes_are_left_unused(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = advice(capsys, f"--from={make_run('run', 16)}", "--devices=1000000000", "rollout.num_slots=16")
    ranks, workers = (int(text.rpartition(f"{key}=")[2].split()[0]) for key in ("num_ranks", "num_workers"))
    assert 1 <= ranks <= 384, "a rank for each sample of a step"
    assert 1 <= workers <= 1024
    assert f"best for 1,000,000,000 devices, {10**9 - ranks - workers:,} of them unused: " in text


def test_a_run_with_too_few_steps_is_refused(make_run: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="expected at least 3 train steps to calibrate from, got 2"):
        advise.main(["--config", "quickstart.yaml", f"--from={make_run('run', 16, num_steps=2)}"])
