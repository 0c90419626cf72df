"""What operators see: logs, metrics, records of a run, progress."""
