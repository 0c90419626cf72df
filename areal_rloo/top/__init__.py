"""Show a run on the terminal while it goes on: `python -m areal_rloo.top runs/latest`.

- `fleet` asks the processes of the run for their metrics.
- `screen` draws records and metrics as tables.
"""
