"""Launchers: start the processes of a run with one command, and end with one exit code.

In the order of a start:

- `local`: the command for this machine; `slurm` and `ray` are the commands for clusters, in folders of their own.
- `run`, `quickstart` and `resume`: call the launcher that the command line, or the last start of a run, names.
- `sweep`: a run for each combination of several values.
- `start`: the command line, the checks, and the first files of the run folder, for every launcher.
- `epochs`: the train steps of `data.num_epochs`.
- `run_folder`: the name of the run folder and the files in it for launchers.
- `hosts`: the hosts of a run, the GPUs of this host, and locks that keep local runs apart.
- `fit`: values for every `auto`, by an estimate of the memory; `engine_memory` is the engine's part, and `remedies` the
  advice for a plan too large for the GPUs, and `count_remedies` for a plan with too few GPUs, or with GPUs to spare.
- `host_memory`: the memory of a host in a run, for the doctor.
- `gpu_need`: the GPUs of a config, for a machine without a GPU.
- `placement`: a seat (host, GPUs, cores) for each process.
- `nccl`: the versions of NCCL here and of a server, and a transport for two versions.
- `plan`: the command line of each process; `--dry-run` prints the plan.
- `job`: a run from the first process to the last; `preparation` is the first part, the tiny model.
- `supervisor`: starts processes and restarts crashed ones; `processes` are those of this host.
- `ranks`: the ranks of the learner as a unit.
- `long_logs`: shortens the output of a process.
- `learner_log`: tells the user of a run without progress, and of the first step of a resume.
- `guard`: a process that kills hung processes after the death of the launcher.
- `fleet`: the rollout workers of a run; `scale` is the command that changes their number.
- `advise`: the command that advises on a split of the devices, from the records of a run.
- `doctor`: checks of a host and of a config.
"""
