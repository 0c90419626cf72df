"""Launchers: from one command to the processes of a run, and back to one exit code."""
