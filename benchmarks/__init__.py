"""Benchmarks of areal_rloo: `python -m benchmarks --list` names them all."""
