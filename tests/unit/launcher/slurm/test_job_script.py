"""The script of a Slurm job, and the srun of each step."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from areal_rloo.config import load_config
from areal_rloo.errors import ConfigError
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.launcher.slurm import job
from areal_rloo.launcher.slurm.__main__ import main, sbatch_script
from areal_rloo.launcher.slurm.job import step_command

SPEC = ProcessSpec(
    name="rollout-3",
    role="rollout worker",
    host="n7",
    device="cuda",
    gpu_ids=("2", "3"),
    num_threads=4,
    environment={"CUDA_VISIBLE_DEVICES": "2,3", "OMP_NUM_THREADS": "4"},
    command=("/our/python", "-m", "areal_rloo.rollout", "--worker-id=rollout-3"),
)


def script(*overrides: str, resume: bool = False) -> str:
    return sbatch_script(
        load_config("quickstart.yaml", list(overrides)), Path("/shared/run/submitted-1.yaml"), resume=resume
    )


def directives(*overrides: str) -> set[str]:
    lines = script(*overrides).splitlines()
    return {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}


def test_the_script_is_valid_bash_and_execs_the_launcher() -> None:
    text = script(r'launcher.slurm.setup="module load cuda\nexport A=1"', resume=True)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "\nmodule load cuda\nexport A=1\n" in text
    last = text.strip().splitlines()[-1]
    assert last.startswith("exec ")
    assert last.endswith(
        "-m areal_rloo.launcher.slurm.job --run-folder=/shared/run --submitted=submitted-1.yaml --resume"
    )


def test_the_directives_have_the_hosts_and_limits_of_the_config() -> None:
    asked = directives(
        *("launcher.num_hosts=4", "launcher.cores_per_host=96", "launcher.gpus_per_host=8", "run.name=mine"),
        *("launcher.memory_per_host=1000000000", "launcher.slurm.partition=gpu", "launcher.slurm.account=lab"),
        *("launcher.slurm.time_limit='1-12'", "launcher.slurm.warn_before_s=600"),
        "launcher.slurm.arguments={qos: high, exclude: 'n[1-2]', contiguous: true, comment: null, nice: false}",
    )
    assert asked >= {
        *("--nodes=4", "--cpus-per-task=96", "--gpus-per-node=8", "--mem=954M", "--job-name=mine"),
        *("--partition=gpu", "--account=lab", "--time=1-12", "--signal=B:USR1@600", "--requeue"),
        *("--qos=high", "--exclude='n[1-2]'", "--contiguous", "--output=/shared/run/job.out", "--open-mode=append"),
    }
    assert not any(word in one for one in asked for word in ("comment", "nice", "exclusive", "array"))


def test_without_core_counts_the_job_has_whole_nodes() -> None:
    assert directives() >= {"--nodes=1", "--exclusive", "--mem=0"}
    assert "--no-requeue" in directives("launcher.slurm.requeue=false")


def test_a_path_with_spaces_and_percent_signs_is_quoted() -> None:
    text = sbatch_script(
        load_config("quickstart.yaml", []), Path("/shared/my runs/50%j/submitted-1.yaml"), resume=False
    )
    assert "#SBATCH --output='/shared/my runs/50%%j/job.out'" in text
    assert text.strip().endswith("'--run-folder=/shared/my runs/50%j' --submitted=submitted-1.yaml")


def test_memory_per_core_replaces_memory_per_node() -> None:
    assert "--mem-per-cpu=2G" in directives("launcher.slurm.arguments={mem-per-cpu: 2G}")
    assert "--mem=0" not in directives("launcher.slurm.arguments={mem-per-cpu: 2G}")


def test_an_array_has_a_job_and_a_folder_per_seed() -> None:
    asked = directives("launcher.slurm.num_seeds=4", "run.seed=10")
    assert asked >= {"--array=0-3", "--output=/shared/run/job-%a.out"}, "Slurm's indices end at 1000, seeds nowhere"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("launcher.slurm.arguments={nodes: 3}", "launcher.slurm.arguments.nodes: not an option here: set launcher.num"),
        ("launcher.slurm.arguments={node: 3}", "arguments.node: the beginning of nodes, which is not an option here"),
        ("launcher.slurm.arguments={--array: 0-3}", "set launcher.slurm.num_seeds"),
        ("launcher.slurm.time_limit=soon", "launcher.slurm.time_limit: expected minutes"),
        ("launcher.slurm.time_limit=1234567", "launcher.slurm.time_limit: expected minutes"),
        ('launcher.slurm.partition="gpu\\nrm"', "launcher.slurm.partition: expected a single line, got 'gpu rm'"),
        ('launcher.slurm.arguments={comment: "a\\nb"}', "launcher.slurm.arguments.comment: expected a single line"),
        (
            "launcher.slurm.arguments={a b: 1}",
            "launcher.slurm.arguments: expected names of options of sbatch, got 'a b'",
        ),
        ("launcher.slurm.time_limit='6'", "expected more than launcher.slurm.warn_before_s=300 and a minute"),
        ("launcher.slurm.time_limit='5:59'", "got '5:59'; the warning would come at the start of the job"),
        ("launcher.slurm.time_limit='0:06:00'", "got '0:06:00'"),
        ("launcher.slurm.time_limit='0-0:6'", "got '0-0:6'"),
        (
            "launcher.slurm.warn_before_s=30",
            "slurm.warn_before_s: expected more than launcher.drain_timeout_s",
        ),
        ("launcher.container.runtime=pyxis", "launcher.container.image: expected an image with runtime pyxis"),
        ("launcher.container={runtime: pyxis, image: a.sqsh, mounts: [data]}", "expected /SOURCE:/TARGET, got 'data'"),
    ],
)
def test_options_that_slurm_would_misread_are_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        script(override)
    assert words in str(refused.value)


@pytest.mark.parametrize("limit", ["7", "6:01", "0:06:01", "0-1", "0-0:7", "0-0:6:1", "1-0", "0", "1:30:00"])
def test_a_time_limit_longer_than_the_warning_is_accepted(limit: str) -> None:
    assert f"--time={limit}" in directives(f"launcher.slurm.time_limit={limit}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("launcher.cores_per_host=8", True),
        ("launcher.cores_per_host=0", True),  # whole nodes, which may well have GPUs
        ("launcher.gpus_per_host=8", False),
        ("launcher.slurm.arguments={gres: gpu:8}", False),
    ],
)
def test_a_job_without_gpus_prints_a_warning(override: str, said: bool, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "quickstart.yaml", "--dry-run", override]) == 0
    assert ("the job asks for no GPU" in capfd.readouterr().err) == said


def test_a_step_has_its_node_and_variables_and_shares_the_job() -> None:
    command = step_command(SPEC, load_config("quickstart.yaml", []).launcher, Path("/shared/run"))
    assert command[0] == "srun"
    assert {"--nodelist=n7", "--job-name=rollout-3", "--overlap", "--ntasks=1"} <= set(command)
    at = command.index("env")
    assert command[at + 1] == "OMP_NUM_THREADS=4"
    assert command[-4:] == SPEC.command


@pytest.mark.parametrize(("seen", "chosen"), [("4,5,6,7", "6,7"), ("0,1,2,3", "2,3"), ("", "2,3")])
def test_a_step_chooses_its_gpus_from_the_visible_ones(seen: str, chosen: str) -> None:
    """Where a site does not renumber them, GPUs 2 and 3 of the job are not those of the node."""
    says = (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'])")
    spec = msgspec.structs.replace(SPEC, command=says)
    command = step_command(spec, load_config("quickstart.yaml", []).launcher, Path("/shared/run"))
    ended = subprocess.run(
        command[command.index("env") :],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": seen},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == f"{chosen} 4\n"


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_a_step_in_a_container_has_the_run_folder_and_its_gpus(runtime: str) -> None:
    container = f"launcher.container={{runtime: {runtime}, image: /images/a.sqsh, mounts: ['/data:/data']}}"
    command = step_command(SPEC, load_config("quickstart.yaml", [container]).launcher, Path("/shared/run"))
    words = " ".join(command)
    assert "/images/a.sqsh" in words
    assert "/shared/run:/shared/run" in words
    assert "/data:/data" in words
    assert "env OMP_NUM_THREADS=4 python3 " in words
    assert words.endswith("2,3 python3 -m areal_rloo.rollout --worker-id=rollout-3")
    assert ("--nv" in command) == (runtime == "apptainer")


def test_a_node_with_an_ipv6_address_alone_has_this_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        addresses = {"both": ("fd00::1", "10.0.0.1"), "new": ("fd00::2",)}[host]
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [(family, 1, 6, "", (address, port)) for family, address in zip(families, addresses, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    assert job._resolved("node-0", "both") == "10.0.0.1", "ZeroMQ takes this address of a name, too"
    assert job._resolved("node-1", "new") == "fd00::2"
    assert job._resolved("node-2", "fd00::3") == "fd00::3"
