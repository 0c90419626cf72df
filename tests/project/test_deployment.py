"""The image, the manifests, the job script and docs/deploy.md agree with the package."""

import functools
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_rloo import errors
from areal_rloo.config import load_config
from areal_rloo.engines.installed import SGLANG
from areal_rloo.launcher.placement import Host, Placement
from areal_rloo.launcher.start import placed

REPO = Path(__file__).resolve().parents[2]
DEPLOY = REPO / "docs" / "deploy.md"
DOCKERFILE = REPO / "launcher" / "docker" / "Dockerfile"
RAYJOB = REPO / "launcher" / "ray" / "rayjob.yaml"
MONITOR = RAYJOB.with_name("monitor.yaml")
VOLUME = REPO / "launcher" / "ray" / "volume.yaml"
CLUSTER = REPO / "launcher" / "ray" / "cluster.yaml"
SCRIPTS = Path(sys.executable).parent
HAS_RAY = importlib.util.find_spec("ray") is not None
LAUNCHER = re.compile(r"areal_rloo\.launcher\.(local|slurm|ray)")
WITHOUT_CLUSTER = "ClusterName=none\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=main Nodes=n1\n"


def test_every_exit_code_of_a_process_is_explained() -> None:
    ours = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    explained = re.findall(r"^\| (\d+) \| (?:all|the|a) ", DEPLOY.read_text(), re.MULTILINE)
    assert {0, 1, 2, *ours} <= set(map(int, explained))


@functools.cache
def output(*command: str, **environment: str) -> str:
    """Return the standard output of a command that must succeed; cached."""
    ended = subprocess.run(
        command, cwd=REPO, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, f"{shlex.join(command)}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def dry_run(command: Sequence[str]) -> str:
    """Return the plan of a launcher, without a cluster and without SGLang, which the local launcher looks for."""
    arguments = list(command[command.index("-m") :])
    if "--address" in arguments:
        at = arguments.index("--address")
        del arguments[at : at + 2]
    chosen = [argument for argument in arguments if argument not in ("--resume", "--wait", "--dry-run")]
    if "areal_rloo.launcher.local" in chosen or ("run" in chosen and "--launcher" not in chosen):
        chosen.append("rollout.engine=embedded")
    return output(sys.executable, *chosen, "--dry-run", RAY_ADDRESS="")


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if hadolint is None:
        pytest.skip("no hadolint here")
    assert output(hadolint, str(DOCKERFILE)) == ""


def test_the_files_of_the_image_exist_and_reach_docker() -> None:
    rules = [line for line in (REPO / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    assert rules[0] == "*"
    for name in itertools.chain.from_iterable(map(str.split, copied)):
        assert (REPO / name).exists(), name
        assert f"!{name}" in rules, name
    for hidden in (".venv", "runs", ".git", "tests"):
        assert f"!{hidden}" not in rules
    assert any(fnmatch("a/__pycache__", rule) for rule in rules)


def test_the_image_has_the_tested_sglang_and_the_ray_of_the_manifest() -> None:
    image = DOCKERFILE.read_text()
    assert f"ARG SGLANG_VERSION={SGLANG.tested_version}\n" in image
    assert re.search(r"-c constraints\.txt '\.\[\S*\bray\b", image)
    version = _ray_job()["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray=={version}" in (REPO / "constraints.txt").read_text().splitlines()


def test_the_learner_of_the_image_gets_the_torch_of_sglang(tmp_path: Path) -> None:
    """Run the image's own command, with a Python of another torch in the place of SGLang's."""
    (command,) = re.findall(r"^RUN (sed -i .*) \\$", DOCKERFILE.read_text(), re.MULTILINE)
    metadata = tmp_path / "torch-9.8.7.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.8.7\n")
    python = f"env PYTHONPATH={tmp_path} {sys.executable} -S"
    (tmp_path / "constraints.txt").write_text((REPO / "constraints.txt").read_text())
    shell = ["sh", "-ec", command.replace("/opt/sglang/bin/python", python)]
    subprocess.run(shell, cwd=tmp_path, check=True, timeout=60)
    before = (REPO / "constraints.txt").read_text()
    assert (tmp_path / "constraints.txt").read_text() == re.sub(r"(?m)^torch==.*$", "torch==9.8.7", before) != before


def test_prometheus_reads_the_folder_that_the_job_writes() -> None:
    text = MONITOR.read_text()
    scrape = yaml.safe_load(text)
    (folder,) = [word.partition("=")[2] for word in _entrypoint() if word.startswith("telemetry.targets_folder=")]
    assert scrape["spec"]["fileSDConfigs"][0]["files"] == [f"{folder}/*.json"]
    advised = yaml.safe_load("\n".join(re.findall(r"^#   (spec:|  .*)$", text, re.MULTILINE)))["spec"]
    assert advised["scrapeConfigSelector"]["matchLabels"] == scrape["metadata"]["labels"]
    claims = {v["persistentVolumeClaim"]["claimName"] for v in advised["volumes"]}
    for _, _, pod in _pods():
        assert claims == {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "emptyDir" not in v}
    assert folder.startswith(advised["volumeMounts"][0]["mountPath"] + "/")


def _manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(RAYJOB.read_text()))


def _ray_job() -> dict[str, Any]:
    (job,) = [each for each in _manifests() if each["kind"] == "RayJob"]
    return job


def _pods() -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Yield the number, the parameters of `ray start` and the pod of each group."""
    cluster = _ray_job()["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]
    yield 1, head["rayStartParams"], head["template"]["spec"]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"]
        yield group["replicas"], group["rayStartParams"], group["template"]["spec"]


def _hosts() -> list[Host]:
    hosts = []
    for num, parameters, pod in _pods():
        limits = pod["containers"][0]["resources"]["limits"]
        cores = int(parameters.get("num-cpus", limits["cpu"]))
        gpu_ids = tuple(map(str, range(int(limits.get("nvidia.com/gpu", 0)))))
        names = (f"pod-{len(hosts) + index}" for index in range(num))
        if cores or gpu_ids:  # a head that offers nothing is no host of the run
            hosts += [Host(name, name, cores, gpu_ids) for name in names]
    return hosts


def _entrypoint() -> list[str]:
    return shlex.split(_ray_job()["spec"]["entrypoint"])


def test_the_ray_job_has_the_fields_that_kuberay_requires() -> None:
    job = _ray_job()
    assert job["apiVersion"] == "ray.io/v1"
    spec = job["spec"]
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "SidecarMode")
    assert spec["shutdownAfterJobFinishes"] is True
    for _, _, pod in _pods():
        (container,) = pod["containers"]
        assert container["image"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_all_pods_share_the_run_folder_and_have_shared_memory() -> None:
    claim = yaml.safe_load(VOLUME.read_text())
    assert [each["kind"] for each in _manifests()] == ["RayJob"], "its deletion must not delete the volume"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (folder,) = [word.removeprefix("run.folder=") for word in _entrypoint() if word.startswith("run.folder=")]
    for _, _, pod in _pods():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        at = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert at["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        (shared,) = [place for place, volume in at.items() if "persistentVolumeClaim" in volume]
        assert at[shared]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert Path(folder).is_relative_to(shared)


def test_the_entrypoint_of_the_ray_job_is_a_valid_command() -> None:
    assert _entrypoint()[:3] == ["python", "-m", "areal_rloo.launcher.ray"]
    assert "rollout-0" in dry_run(_entrypoint())


def test_the_plan_of_the_ray_job_uses_every_gpu_of_the_pods() -> None:
    words = _entrypoint()
    at = words.index("--config")
    config = load_config(words[at + 1], words[at + 2 :])
    hosts = _hosts()
    assert config.launcher.num_hosts == len(hosts)
    config, placement = placed(config, hosts)
    assert _taken_gpus(placement) == sum(len(host.gpu_ids) for host in hosts)
    for host in placement.used_hosts:
        assert sum(seat.num_threads for seat in _seats(placement) if seat.host == host) <= host.num_cores
    stops_after_s = yaml.safe_load(_ray_job()["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]
    assert isinstance(stops_after_s, str), "as variables of the environment are"
    assert float(stops_after_s) > config.launcher.drain_timeout_s
    for _, _, pod in _pods():
        assert pod["terminationGracePeriodSeconds"] > config.launcher.drain_timeout_s
        has_gpus = "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]
        assert has_gpus == any(each["key"] == "nvidia.com/gpu" for each in pod.get("tolerations", ()))


def _seats(placement: Placement) -> tuple[Any, ...]:
    return (*placement.learner, *placement.workers)


def _taken_gpus(placement: Placement) -> int:
    return sum(len(seat.gpu_ids) for seat in _seats(placement))


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed here")
def test_ray_up_accepts_the_cluster(tmp_path: Path) -> None:
    code = (
        "import sys, yaml\n"
        "from ray.autoscaler._private.util import prepare_config, validate_config\n"
        "validate_config(prepare_config(yaml.safe_load(open(sys.argv[1]))))\n"
    )
    mistaken = tmp_path / "cluster.yaml"
    mistaken.write_text(CLUSTER.read_text() + "\nno_such_key: 1\n")
    accepted, refused = (
        subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        for path in (CLUSTER, mistaken)
    )
    assert accepted.returncode == 0, accepted.stderr
    assert "no_such_key" in refused.stderr


def test_the_cluster_starts_ray_on_head_and_workers(tmp_path: Path) -> None:
    cluster = yaml.safe_load(CLUSTER.read_text())
    assert cluster["provider"]["type"] == "local"
    assert cluster["provider"]["head_ip"] not in cluster["provider"]["worker_ips"]
    (head,) = [command for command in cluster["head_start_ray_commands"] if "ray start" in command]
    (worker,) = [command for command in cluster["worker_start_ray_commands"] if "ray start" in command]
    assert "--head" in head
    assert "$RAY_HEAD_IP" in worker
    if HAS_RAY:
        for command in (head, worker):
            _check_options(shlex.split(command[command.index("ray start") :]), tmp_path)


@pytest.fixture(scope="module")
def job_script() -> str:
    (command,) = [one for one in _commands() if "launcher.slurm.partition=gpu" in one]
    shown = dry_run(_ours(command) or [])
    return shown[shown.index("#!/usr/bin/env bash") :]


def test_the_job_script_of_four_nodes_execs_the_launcher(job_script: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(job_script)
    output("bash", "-n", str(script))
    assert "$" not in job_script
    assert re.search(r"^exec \S+ -m areal_rloo\.launcher\.slurm\.job --run-folder=/", job_script, re.MULTILINE)
    directives = re.findall(r"^#SBATCH (--[a-z-]+)(?:=(\S+))?$", job_script, re.MULTILINE)
    assert len(directives) == job_script.count("#SBATCH ")
    assert {("--nodes", "4"), ("--gpus-per-node", "8"), ("--cpus-per-task", "96")} <= set(directives)
    assert dict(directives)["--time"] == "4:00:00"


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed here")
def test_sbatch_knows_every_option_of_the_job_script(job_script: str, tmp_path: Path) -> None:
    """sbatch parses the options before the search for a controller, which fails here."""
    (tmp_path / "slurm.conf").write_text(WITHOUT_CLUSTER)
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    for text, refused in ((job_script, False), (job_script.replace("--mem=0", "--no-such=0"), True)):
        script = tmp_path / "job.sbatch"
        script.write_text(text)
        with subprocess.Popen(
            ["sbatch", "--test-only", str(script)], env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                _, words = process.communicate(timeout=60 if refused else 2)
            except subprocess.TimeoutExpired:
                words = ""
                process.kill()
        assert ("option" in words) == refused, words


def _blocks() -> list[tuple[str, str]]:
    return re.findall(r"^```(bash|text)\n(.*?)^```", DEPLOY.read_text(), re.DOTALL | re.MULTILINE)


def _split(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def _commands() -> list[list[str]]:
    return [command for kind, block in _blocks() if kind == "bash" for command in _split(block)]


def _program(command: Sequence[str]) -> str:
    return Path(command[0]).name


def _ours(command: Sequence[str]) -> list[str] | None:
    """Return the launcher's part of a command, if there is any."""
    if _program(command) == "areal-rloo" and command[1] == "run":
        return ["python", "-m", "areal_rloo", *command[1:]]
    at = next((index for index, word in enumerate(command) if LAUNCHER.fullmatch(word)), None)
    return None if at is None else ["python", "-m", *command[at:]]


# How many words a program and its subcommand are; what it can do it says itself.
SUBCOMMANDS = {"ray": 2, "kubectl": 2, "docker": 2, "scancel": 1, "scontrol": 1, "enroot": 2, "apptainer": 2}
SUBCOMMANDS |= {"prometheus": 1, "chronyc": 1, "iperf3": 1, "all_reduce_perf": 1}


@pytest.mark.parametrize("command", _commands(), ids=shlex.join)
def test_a_command_of_the_document_works(command: list[str], tmp_path: Path) -> None:
    ours = _ours(command)
    if ours is not None:
        dry_run(ours)
    elif _program(command) == "areal-rloo":
        program = command[1]
        if program == "doctor":
            _run_doctor(command)
            return
        told = output(sys.executable, "-m", "areal_rloo", program, "--help")
        assert all(word in told for word in command if word.startswith("--"))
        return
    if ours is not None and _program(command) in ("python", "areal-rloo"):
        return
    for file in (word for word in command if word.startswith("launcher/")):
        assert (REPO / file).is_file(), file
    its_own = command[: command.index("--")] if "--" in command else command[: _first_of_ours(command)]
    _check_options(its_own, tmp_path)


def _first_of_ours(command: Sequence[str]) -> int:
    """Return the index of the first word after the runtime's own options: the image's command."""
    return command.index("python") if "python" in command else len(command)


def _check_options(command: Sequence[str], folder: Path) -> None:
    """Check that the program knows every option; skip without the program."""
    program = _program(command)
    found = shutil.which(program, path=f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if found is None:
        pytest.skip(f"no {program} here")
    length = SUBCOMMANDS[program] + (command[1] == "job")
    if program == "ray":
        known = _options_of_ray()[" ".join(command[1:length])]
    else:
        (folder / "slurm.conf").write_text(WITHOUT_CLUSTER)  # without one Slurm's programs say nothing
        shown = output(found, *command[1:length], "--help", SLURM_CONF=str(folder / "slurm.conf"))
        known = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", shown)
    used = [option[0] for word in command[length:] if (option := re.match(r"--?[a-z][a-z-]*", word))]
    assert set(used) <= set(known), f"{program} has no {set(used) - set(known)}"


@functools.cache
def _options_of_ray() -> dict[str, list[str]]:
    """Return the options of each subcommand; cached, because the import of Ray takes seconds."""
    code = (
        "import json\n"
        "from ray.scripts.scripts import cli\n"
        "def options(group, *before):\n"
        "    for name, command in group.commands.items():\n"
        "        yield ' '.join((*before, name)), [word for each in command.params for word in each.opts]\n"
        "        yield from options(command, *before, name) if hasattr(command, 'commands') else ()\n"
        "print(json.dumps(dict(options(cli))))\n"
    )
    return json.loads(output(sys.executable, "-c", code))


def _run_doctor(command: Sequence[str]) -> None:
    """Run the quick checks. A wrong finding about this machine is not an error of the document."""
    arguments = list(command[1:])
    if "--config" in arguments:
        arguments.append("rollout.engine=embedded")
    doctor = [sys.executable, "-m", "areal_rloo", *arguments, "--quick"]
    shown = subprocess.run(doctor, cwd=REPO, capture_output=True, text=True, check=False).stdout
    assert re.search(r"^\d+ ok, \d+ wrong, \d+ unsure$", shown, re.MULTILINE), shown
    assert not re.search(r"^wrong +(arguments|config):", shown, re.MULTILINE), shown


def test_the_topologies_of_the_document_match_the_dry_run() -> None:
    num_shown = 0
    blocks = _blocks()
    for (kind, commands), (following, shown) in itertools.pairwise(blocks):
        if (kind, following) != ("bash", "text"):
            continue
        command = [ours for ours in map(_ours, _split(commands)) if ours is not None][-1]
        table = [" ".join(line.split()) for line in dry_run(command).splitlines()]
        for line in (line for line in shown.splitlines() if line.strip(" .")):
            assert any(row.startswith(" ".join(line.split())) for row in table), line
        num_shown += 1
    assert num_shown == sum(kind == "text" for kind, _ in blocks)
