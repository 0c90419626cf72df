"""Several runs on one page: settings by their differing options, seeds as intervals."""

import html.parser
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import msgspec
import pytest

from areal_rloo.config import dump_config, load_config
from areal_rloo.errors import DataError
from areal_rloo.learner.stretches import begin_stretch
from areal_rloo.report.comparison import _read as read_run
from areal_rloo.report.comparison import grouped, mean_with_interval, write_comparison
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.records import EvalRecord, TrainRecord

MakeTrainRecord = Callable[..., TrainRecord]
MakeRun = Callable[..., Path]


class Cells(html.parser.HTMLParser):
    """The cells of the first table, by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text.partition("<table class=results>")[2].partition("</table>")[0])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.rows[-1][-1] += data


@pytest.fixture
def make_run(tmp_path: Path, make_train_record: MakeTrainRecord, eval_record: EvalRecord) -> MakeRun:
    def make(name: str, *overrides: str, accuracies: tuple[float, ...] = (0.4, 0.8), num_steps: int = 12) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = load_config("quickstart.yaml", [f"run.folder={folder}", *overrides])
        (folder / "config.yaml").write_text(dump_config(config))
        file = MetricsFile(folder / "metrics.jsonl")
        for step in range(1, num_steps + 1):
            times = {"num_train_steps": step, "policy_version": step, "wall_s": 5.0 * step}
            file.append(make_train_record(reward_mean=0.1 * step, **times))
        for version, accuracy in enumerate(accuracies):
            file.append(
                msgspec.structs.replace(eval_record, policy_version=5 * version, accuracy=accuracy, reward=accuracy)
            )
        file.close()
        return folder

    return make


def test_runs_are_settings_by_the_options_with_an_effect(make_run: MakeRun) -> None:
    options = ("algorithm.max_staleness=2", "learner.optimizer.learning_rate=0.01")
    runs = [
        make_run("one", "run.seed=1"),
        make_run("two", "run.seed=2", "launcher.max_restarts=9", "telemetry.trace=true"),
        make_run("three", *options),
        make_run("four", *options, "algorithm.group_size=4", "algorithm.min_reward_std=0.1", "run.seed=4"),
    ]
    settings = grouped([read_run(folder) for folder in runs])
    assert [len(setting.runs) for setting in settings] == [2, 1, 1]
    first, second, third = (setting.name for setting in settings)
    assert first == "max_staleness=1, learning_rate=0.0001, group_size=8, ..."
    assert second == "max_staleness=2, learning_rate=0.01, group_size=8, ..."
    assert third == "max_staleness=2, learning_rate=0.01, group_size=4, ...", "more options differ than fit"


def test_a_single_setting_has_the_name_of_the_run(make_run: MakeRun) -> None:
    (alone,) = grouped([read_run(make_run("mine"))])
    assert alone.name == "mine"
    (together,) = grouped([read_run(make_run("a", "run.seed=1")), read_run(make_run("b", "run.seed=2"))])
    assert together.name == "all runs"


def test_the_table_has_means_and_intervals_over_seeds(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"s{seed}", f"run.seed={seed}", accuracies=(0.4, 0.7 + 0.1 * seed)) for seed in range(3)]
    runs.append(make_run("other", "algorithm.max_staleness=0", accuracies=(0.4, 0.5), num_steps=3))
    page = write_comparison(runs, tmp_path / "comparison.html").read_text()
    heads, seeds, other = Cells(page).rows
    assert heads[:5] == ["setting", "runs", "train steps", "first accuracy", "last accuracy"]
    assert seeds[:5] == ["max_staleness=1", "3", "12", "0.4", "0.8 ± 0.248"]  # 4.303 * 0.1 / sqrt(3)
    assert other[:5] == ["max_staleness=0", "1", "3", "0.4", "0.5"]
    assert seeds[5] == "0.75", "the mean reward of steps 3 to 12"
    assert page.count("class='line c0'") > 20
    assert page.count("class='line c1'") > 20
    assert "<polygon" in page, "the range over seeds is an area"
    by_time = page.partition("by training time, in s</h2>")[2].partition("</section>")[0]
    assert "max_staleness=1, s2 at 25: 0.9" in by_time, "a line for each run, by the time of the version"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("learner.lora={rank: 4}", 'lora={"rank": 4'),
        ("data.eval=null", "eval=[]"),
        ("algorithm.kl={coefficient: 0.1, adaptive: {target: 0.1, horizon: 9}}", "adaptive="),
    ],
)
def test_a_section_that_only_one_run_has_is_an_option(options: str, name: str, make_run: MakeRun) -> None:
    more = ["evaluation.every_n_versions=0"] if "eval=null" in options else []
    reference = ["model.reference.path=initial"] if "kl" in options else []
    settings = grouped([read_run(make_run("plain", *more)), read_run(make_run("other", options, *more, *reference))])
    assert len(settings) == 2
    assert name in settings[1].name
    assert settings[0].name != settings[1].name


def test_settings_that_differ_in_a_later_option_have_names_of_their_own(make_run: MakeRun) -> None:
    first = ("algorithm.max_staleness=2", "learner.optimizer.learning_rate=0.01", "algorithm.group_size=4")
    runs = [make_run("a"), make_run("b", *first), make_run("c", *first, "rollout.sampling.temperature=0.8")]
    names = [setting.name for setting in grouped([read_run(folder) for folder in runs])]
    assert len({*names}) == 3
    assert names[2].count("temperature=0.8") == 1


def test_a_run_named_twice_and_an_earlier_page_count_once(make_run: MakeRun, tmp_path: Path) -> None:
    """`report runs/*` names runs/latest, a link, and the page of the call before."""
    runs = [make_run("a", "run.seed=1"), make_run("b", "run.seed=2")]
    (tmp_path / "latest").symlink_to(runs[0])
    target = tmp_path / "comparison.html"
    for _ in range(2):
        page = write_comparison([*runs, tmp_path / "latest", target], target).read_text()
        assert "2 runs, 1 setting<" in page


def test_the_interval_is_students(make_run: MakeRun) -> None:
    assert mean_with_interval([3.0]) == (3.0, None)
    mean, half = mean_with_interval([1.0, 2.0])
    assert (mean, half) == (1.5, pytest.approx(12.71 * math.sqrt(0.5) / math.sqrt(2)))
    many = [float(number % 2) for number in range(400)]
    normal = NormalDist().inv_cdf(0.975)
    spread = math.sqrt(sum((value - 0.5) ** 2 for value in many) / 399 / 400)
    assert mean_with_interval(many)[1] == pytest.approx(normal * spread, rel=0.01)


def test_accuracies_of_another_set_are_left_out(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("a", accuracies=(0.1, 0.4, 0.8))  # at versions 0, 5 and 10
    begin_stretch(folder, load_config(str(folder / "config.yaml")), 0)
    begin_stretch(folder, load_config(str(folder / "config.yaml"), ["data.eval.num_prompts=77"]), 3)
    rows = Cells(write_comparison([folder], tmp_path / "comparison.html").read_text()).rows
    assert rows[1][3:5] == ["0.4", "0.8"]


def test_runs_of_different_length_share_the_versions_that_all_have(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("long", "run.seed=1", num_steps=12), make_run("short", "run.seed=2", num_steps=5)]
    page = write_comparison(runs, tmp_path / "comparison.html").read_text()
    reward = page.partition("<h2>Reward of the batch")[2].partition("</section>")[0]
    assert "at 5:" in reward and "at 6:" not in reward


def test_the_command_compares_several_folders_and_refuses_others(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [str(make_run("a", "run.seed=1")), str(make_run("b", "run.seed=2"))]

    def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "areal_rloo.report", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout.strip(), ended.stderr.strip()

    assert run(*runs) == (0, str(tmp_path / "comparison.html"), "")
    assert run(*runs, "--output", str(tmp_path / "page.html"))[1] == str(tmp_path / "page.html")
    assert run(runs[0], "--output", "x.html")[::2] == (
        2,
        "error: --output: expected several run folders; the report of one is in the folder of the run",
    )
    code, _, error = run(runs[0], str(tmp_path))
    assert (code, error) == (
        2,
        f"error: {tmp_path}: no run here (config.yaml is missing); expected a run folder such as runs/latest",
    )


def test_a_run_without_records_and_a_config_of_another_version(make_run: MakeRun, tmp_path: Path) -> None:
    empty = make_run("empty", accuracies=(), num_steps=0)
    full = make_run("full", "algorithm.max_staleness=0")
    assert Cells(write_comparison([empty, full], tmp_path / "c.html").read_text()).rows[1][2:5] == ["0", "-", "-"]
    (empty / "config.yaml").write_text("unknown: 1\n")
    with pytest.raises(DataError, match="the config is of another version"):
        write_comparison([empty, full], tmp_path / "c.html")
