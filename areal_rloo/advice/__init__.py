"""Predict the throughput and the staleness of a run, name the bottleneck, and advise on the split of the devices.

In: the records of a run and its config. Out: forecasts and words. Pure functions; docs/advice.md has the model, the
limits of the model and the measured errors.

- `simulation` runs a schedule in virtual time.
- `calibration` measures the speeds of a run from the records.
- `shrinking` makes a large run small enough to simulate.
- `forecast` counts the steps of a simulation, names the bottleneck of a run, and searches the best setup.
"""
