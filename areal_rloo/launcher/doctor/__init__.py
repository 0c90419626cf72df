"""Checks before a run: everything that would end the run or slow it down, each with a fix.

The quick checks take well under a second together, or a few seconds if the hub must be asked for a model or a dataset;
every launcher makes them. None imports torch. `inputs.check_loading` tries models in a process, for some seconds, and
`inputs.check_own_parts` the user's parts of the algorithm: a start makes these checks before its plan, and `__main__`
after all others. The thorough checks start
processes and open connections; `__main__` makes them, too.

- `base`: a finding, and the input of a check.
- `software`: Python, packages, environment variables.
- `inputs`: models, data, functions and the server as the config names them.
- `disk`: the run folder, shared memory, the clock.
- `limits`: ulimits, cores, memory, containers.
- `devices`: GPUs, torch, NCCL; `probe_torch` is a process with torch.
- `addresses`: ports, host names, servers.
- `hub`: models and datasets to download.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from areal_rloo.config import Config
from areal_rloo.launcher.doctor import addresses, devices, disk, hub, inputs, limits, software
from areal_rloo.launcher.doctor.base import Check, Finding, Situation, guarded, raise_first

__all__ = ["Check", "Finding", "Situation", "findings", "guarded", "raise_first"]

QUICK: tuple[Check, ...] = (
    software.check_python,
    software.check_packages,
    inputs.check_models,
    inputs.check_functions,
    inputs.check_data_files,
    disk.check_run_folder,
    disk.check_free_disk,
    disk.check_clock,
)
QUICK_WHERE_IT_RUNS: tuple[Check, ...] = (
    inputs.check_server,
    hub.check_hub,
    addresses.check_ports,
    addresses.check_wire_host,
    addresses.check_metrics_host,
    software.check_extras,
    software.check_variables,
    devices.check_gpus,
    devices.check_nccl,
    disk.check_shared_memory,
    limits.check_processes,
    limits.check_limits,
    limits.check_process_limit,
    limits.check_cores,
    limits.check_memory,
    limits.check_plan,
    inputs.check_tool_sandbox,
)
# Left out without a config. The other checks then take the default config, and report on the machine alone.
NEED_A_CONFIG: tuple[Check, ...] = (
    inputs.check_models,
    inputs.check_data_files,
    disk.check_free_disk,
    limits.check_plan,
)
THOROUGH: tuple[Check, ...] = (addresses.check_servers,)
THOROUGH_WHERE_IT_RUNS: tuple[Check, ...] = (
    devices.check_torch,
    inputs.check_server_imports,
    addresses.check_host_name,
)


def findings(
    config: Config | None, *, folder: Path | None, thorough: bool, runs_here: bool = True
) -> Iterator[Finding]:
    """Make the checks in turn and give their findings. An exception of a check becomes an `unsure` finding.

    Without a config, only the machine is checked; without a folder, the checks of the run folder are skipped. A host
    that only submits the run (`runs_here` is False) cannot check the hosts of the run. Thorough checks take minutes.
    """
    situation = Situation(config or Config(), folder, runs_here)
    checks = [*QUICK, *(QUICK_WHERE_IT_RUNS if runs_here else ())]
    if thorough:
        checks += [*THOROUGH, *(THOROUGH_WHERE_IT_RUNS if runs_here else ())]
    for check in checks:
        if config is not None or check not in NEED_A_CONFIG:
            yield from guarded(check, situation)
