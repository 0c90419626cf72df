"""Show operators a run: logs, metrics, records, progress. Imports no torch.

- `metric` declares a number at the field that holds the number: unit, definition, healthy range.
- `records` defines the lines of metrics.jsonl.
- `metrics` collects numbers for /metrics, which `scrapes` serves, and reads and writes metrics.jsonl.
- `code_state` is the code of a process, and how the code changed on a resume.
- `own_code` names the user's code in a run, and the files that changed on a resume.
- `gpus` reads memory and use of the visible GPUs.
- `targets` tells Prometheus where the processes of a run serve /metrics.
- `wanted` tells how many rollout workers the launcher keeps running.
- `trajectories` reads and writes trajectories.jsonl.
- `record_file` appends lines to both files, and removes the lines after a checkpoint.
- `summary` writes summary.json.
- `progress` prints the state of a run on the terminal.
- `health` says when a run does not learn, from the records.
- `bound` names the half of a run that bounds the throughput.
- `trackers` pass the records on to trackers, in a process each; `tracker_libraries` has the libraries of the trackers.
- `trace` records the work of a process, with times.
- `words` bounds the labels of counts by words from outside.
- `logs` sets up the logs of a process.
- `stacks` writes the stacks of all threads and tasks to the log, on a signal.
- `watchdog` reports work without progress, and ends the process if the work is essential.
"""
