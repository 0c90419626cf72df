"""What would end a run, or slow it down, found before it begins: one check for each thing, with what to do about it.

The quick ones take well under a second together and do not import torch (but for what looks for SGLang, whose package
does); every launcher makes them. `doctor.py` makes the thorough ones too, which start processes and open connections.

| file | what is looked at |
|---|---|
| software.py | Python, packages, environment variables |
| inputs.py | what the config names: models, data, functions, SGLang |
| disk.py | the run folder, shared memory, the clock |
| limits.py | ulimits, cores, memory, containers |
| devices.py, probe_torch.py | GPUs, torch, NCCL |
| addresses.py | ports, names, servers |
| link.py | the network between two hosts |
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from areal_rloo.config import Config
from areal_rloo.launcher.findings.addresses import (
    check_host_name,
    check_hub,
    check_ports,
    check_servers,
    check_wire_host,
)
from areal_rloo.launcher.findings.base import Check, Finding, Situation, State, guarded, raise_first, wrong
from areal_rloo.launcher.findings.devices import check_gpus, check_torch
from areal_rloo.launcher.findings.disk import check_clock, check_free_disk, check_run_folder, check_shared_memory
from areal_rloo.launcher.findings.inputs import (
    check_data_files,
    check_functions,
    check_hub_models,
    check_models,
    check_sglang,
    check_sglang_imports,
    check_tool_sandbox,
)
from areal_rloo.launcher.findings.limits import check_cores, check_limits, check_memory, check_process_limit
from areal_rloo.launcher.findings.software import check_packages, check_python, check_variables

__all__ = ["Check", "Finding", "Situation", "State", "findings", "guarded", "raise_first", "wrong"]

QUICK: tuple[Check, ...] = (
    check_python,
    check_packages,
    check_models,
    check_functions,
    check_data_files,
    check_run_folder,
    check_free_disk,
    check_clock,
)
QUICK_WHERE_IT_RUNS: tuple[Check, ...] = (
    check_sglang,
    check_hub_models,
    check_ports,
    check_wire_host,
    check_variables,
    check_gpus,
    check_shared_memory,
    check_limits,
    check_process_limit,
    check_cores,
    check_memory,
    check_tool_sandbox,
)
THOROUGH: tuple[Check, ...] = (check_servers,)
THOROUGH_WHERE_IT_RUNS: tuple[Check, ...] = (check_torch, check_sglang_imports, check_host_name, check_hub)


def findings(
    config: Config | None,
    *,
    folder: Path | None,
    thorough: bool,
    runs_here: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """Every finding, one after the other as the checks are made. A check that fails itself gives one that is unsure.

    Args:
        config: of the run; None looks at the machine alone.
        folder: the run folder to be; None leaves out what is looked at there.
        thorough: also what takes seconds or minutes.
        runs_here: whether this host will run it; one that only submits cannot know what the others have.
        environment: variables as the run will have them; None: this process's.
    """
    situation = Situation(config, folder, runs_here, dict(os.environ if environment is None else environment))
    checks = [*QUICK, *(QUICK_WHERE_IT_RUNS if runs_here else ())]
    if thorough:
        checks += [*THOROUGH, *(THOROUGH_WHERE_IT_RUNS if runs_here else ())]
    for check in checks:
        yield from guarded(check, situation)
