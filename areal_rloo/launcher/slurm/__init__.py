"""The Slurm launcher: a run as a job, and each process as a step of the job.

- `__main__`: makes the job script, submits the job from a login node, and waits for the end (`--wait`).
- `pending`: says why a submitted job does not start.
- `job`: runs inside the job, on the first node; starts the steps, drains before the time limit and requeues the job.
"""
