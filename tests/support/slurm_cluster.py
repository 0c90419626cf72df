"""A real Slurm cluster of two nodes on this host, for tests to submit jobs to.

A folder comes in, and, if wanted, two networks (networks.py) that make the nodes hosts of their own; a cluster
whose two nodes are idle goes out. `slurm_cluster` waits for the nodes; at the end it kills the daemons and whatever
jobs still run, and waits until no process of this cluster is left. Ports, key, sockets and state belong to one cluster:
several live side by side.

What Slurm 22.05 does, measured on this cluster; tests that wait for a limit, a requeue or a signal rest on it:

- Limits are looked at every 30 s, counted from the start of the controller. `--signal=B:USR1@N` comes at a look: N =
  1 came with 2 and 7 s left and not yet with 32, N = 10 to 60 came with 32 left, which fits "at most N + 30 s left".
  A job past its limit gets SIGTERM at the first look after it. With `--time=1 --signal=B:USR1@60`, submitted to a
  cluster just started, the signal comes after 29 s. An earlier EndTime does not bring the look forward. `scancel
  --batch --signal=USR1 JOB` gives the batch script the same signal in 10 ms.
- A requeued job starts again 6 to 7 s after it ended: it waits for `cred_expire`. With `cred_expire=2` its BeginTime
  was two minutes off, as by default, so 5 stands below. Do not hurry it with `scontrol update StartTime=now`: the
  node still holds the job's credential for revoked, and the job fails for good.
- A batch job starts up to 1 s after `sbatch`; an srun with free cores at once.
- `scancel JOB` sends SIGCONT and SIGTERM to the tasks of all steps and to the batch script, SIGKILL KillWait later. So
  do a requeue and a batch script that ends before its steps (to these).
- `scancel JOB.STEP` and a SIGTERM, SIGHUP or SIGKILL to srun kill the tasks at once, without a SIGTERM. SIGUSR1 and
  SIGUSR2 to srun reach its tasks, SIGINT does not.
- `scancel --signal=TERM JOB.STEP` signals that step alone, in 20 ms. For a step on one node of a job that has two it
  does so too, but ends with 225, "Invalid job id specified".
"""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from support.networks import TwoNetworks
from support.processes import ends_of_logs

from areal_rloo.ports import ReservedPorts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")
NODES = ("n1", "n2")
START_LIMIT_S = 120.0

# config_overrides: slurmd takes the declared size of a node, whatever the host has.
CONFIG = """\
ClusterName=tests
SlurmctldHost={host}({first_address})
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={spool}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=1,bf_interval=1
KillWait=30
MessageTimeout=60
BatchStartTimeout=60
CompleteWait=0
OverTimeLimit=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={spool}/slurmctld.pid
SlurmdPidFile={spool}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=n1 NodeHostname={host} NodeAddr={first_address} Port={first_port} CPUs=4 RealMemory=8000
NodeName=n2 NodeHostname={host} NodeAddr={second_address} Port={second_port} CPUs=4 RealMemory=8000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Return the parts of Slurm that are not installed; tests skip if there are any."""
    return [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]


@dataclass(frozen=True)
class Job:
    """A job as the controller knows it; the controller forgets an ended job after five minutes."""

    job_id: int
    name: str
    state: str  # PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED, TIMEOUT, ...
    reason: str
    restarts: int
    exit_code: int
    exit_signal: int
    nodes: str


class SlurmCluster:
    """Two nodes, n1 and n2, of 4 cores each, in the partition `main`."""

    def __init__(self, folder: Path, spool: Path, ports: tuple[int, ...], networks: TwoNetworks | None) -> None:
        self.folder = folder
        self.networks = networks
        self.prefix: list[str] = networks.first.prefix if networks else []
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _search_path()}
        self._ports = ports  # of the controller and of the two nodes
        self._spool = spool  # short, since the path of a Unix socket has at most 107 characters
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command where the controller runs, and give its standard output."""
        ended = subprocess.run(
            [*self.prefix, *command], env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        if check and ended.returncode:
            raise RuntimeError(f"{command} ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
        return ended.stdout

    def jobs(self) -> list[Job]:
        return [
            _job(line) for line in self.run("scontrol", "--oneliner", "show", "job").splitlines() if "JobId=" in line
        ]

    def settled_jobs(self) -> list[Job]:
        """Once none is COMPLETING, which a job that has ended is until its nodes are free, whatever it ended as."""
        self.wait_for(lambda: all(job.state != "COMPLETING" for job in self.jobs()), timeout_s=60)
        return self.jobs()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        ends_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > ends_s:
                raise TimeoutError(f"not within {timeout_s} s; jobs: {self.jobs()}; {self._ends_of_logs()}")
            time.sleep(0.05)

    def _write_files(self) -> None:
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        controller_port, first_port, second_port = self._ports
        config = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            user=pwd.getpwuid(os.geteuid()).pw_name,
            folder=self.folder,
            spool=self._spool,
            first_address=self.networks.first.address if self.networks else "127.0.0.1",
            second_address=self.networks.second.address if self.networks else "127.0.0.1",
            controller_port=controller_port,
            first_port=first_port,
            second_port=second_port,
        )
        (self.folder / "slurm.conf").write_text(config)

    def _start(self) -> None:
        self._write_files()
        files = {"socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={self._spool / name}" for option, name in files.items()]
        options += [f"--key-file={self.folder / 'munge.key'}", f"--log-file={self.folder / 'munged.log'}"]
        # --force: the folders of tests are closed to other users, which munged takes for a mistake.
        self._daemon("munged", self.prefix, "munged", "--foreground", "--force", *options)
        self._wait_until_up((self._spool / "munge.socket").exists)
        self._daemon("slurmctld", self.prefix, "slurmctld", "-D")
        self._daemon("n1", self.prefix, "slurmd", "-D", "-N", "n1")
        self._daemon("n2", self.networks.second.prefix if self.networks else [], "slurmd", "-D", "-N", "n2")
        self._wait_until_up(lambda: self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False).split() == _IDLE)

    def _daemon(self, name: str, prefix: list[str], *command: str) -> None:
        with (self.folder / f"{name}.output").open("wb") as output:
            self._daemons[name] = subprocess.Popen(
                [*prefix, *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._spool,
            )

    def _wait_until_up(self, condition: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + START_LIMIT_S
        while not condition():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > ends_s:
                raise RuntimeError(f"the Slurm cluster does not come up; ended: {dead}; {self._ends_of_logs()}")
            time.sleep(0.05)

    def _ends_of_logs(self) -> str:
        return ends_of_logs([*self.folder.glob("*.log"), *self.folder.glob("*.output")], num_lines=20)

    def _stop(self) -> None:
        """Kill the daemons first, lest they start or requeue a job, then all that carries this cluster's SLURM_CONF."""
        for daemon in self._daemons.values():
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait()
        ends_s = time.monotonic() + START_LIMIT_S
        while remaining := self._processes():
            if time.monotonic() > ends_s:
                raise RuntimeError(f"processes of the Slurm cluster cannot be killed: {remaining}")
            for process in remaining:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)

    def _processes(self) -> list[psutil.Process]:
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        found = set()
        for process in psutil.process_iter():
            # Read raw: slurmstepd writes its title over the head of its environment, and psutil stops at the first gap.
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found |= {process, *process.children(recursive=True)}
        mine = {psutil.Process(), *psutil.Process().parents()}
        return [process for process in found - mine if _lives(process)]


_IDLE = ["n1", "idle", "n2", "idle"]


@contextlib.contextmanager
def slurm_cluster(folder: Path, networks: TwoNetworks | None = None) -> Iterator[SlurmCluster]:
    """Start a cluster that keeps its files in `folder`, which must be empty or not yet exist."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slurm-") as spool, ReservedPorts(3) as reserved:
        cluster = SlurmCluster(folder.resolve(), Path(spool), reserved.ports, networks)
        try:
            cluster._start()
            yield cluster
        finally:
            cluster._stop()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _search_path() -> str:
    """The daemons lie in folders that the PATH of an ordinary user lacks."""
    return os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"


def _job(line: str) -> Job:
    fields = dict(re.findall(r"(\S+?)=(\S*)", line))
    exit_code, _, exit_signal = fields["ExitCode"].partition(":")
    return Job(
        job_id=int(fields["JobId"]),
        name=fields["JobName"],
        state=fields["JobState"],
        reason=fields["Reason"],
        restarts=int(fields["Restarts"]),
        exit_code=int(exit_code),
        exit_signal=int(exit_signal),
        nodes=fields.get("NodeList", ""),
    )
