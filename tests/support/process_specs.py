"""A process for a launcher to start, with the fields that a test does not care about."""

from areal_rloo.launcher.plan import ProcessSpec


def make_spec(*command: str, name: str = "one", role: str = "test", max_restarts: int = 0) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        role=role,
        host="here",
        device="cpu",
        gpu_ids=(),
        num_threads=1,
        environment={},
        command=command,
        max_restarts=max_restarts,
    )
