"""What `sandbox.py` writes into a file for each program and `sandbox_child.py` reads, as a dict of what marshal knows:
both are the same Python, and marshal costs no import."""

from typing import TypedDict


class Orders(TypedDict):
    parent: int  # the process to die with
    program: str  # its file, in the folder that the child stands in
    package_folders: list[str]
    ruleset: bytes  # struct landlock_ruleset_attr
    rules: list[tuple[str, int]]  # a path, the rights to what lies beneath
    filter: bytes  # an array of struct sock_filter
    limits: list[tuple[int, int, int]]  # a resource, its soft limit, its hard limit
