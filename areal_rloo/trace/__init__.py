"""Join the traces of all processes of a run: the lives of samples, and one file for Perfetto.

In: traces/ of a finished or running run with `telemetry.trace`. Out: trace.json.gz, which https://ui.perfetto.dev opens
in a browser without sending it anywhere. The report writes the file, and `inspect` shows the life of one sample.

- `joined`: reads the files, and gives all times on one clock.
- `lives`: the life of a sample, from lease to train step.
- `perfetto`: writes the file.
"""
