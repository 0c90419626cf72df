"""The Ray launcher: a run on a cluster, and each process owned by a Ray actor.

- `__main__`: the command, also for `ray job submit`.
- `cluster`: the connection, the nodes as hosts, reserved places, and the start of a process in a place.
- `owner`: the actor that owns a process, and the watch over the actor.
"""
