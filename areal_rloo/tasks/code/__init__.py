"""The task `code`: programs of the policy run against tests, each in a sandbox (`areal_rloo/tasks/tools/sandbox.py`).

    row ─► readers ─► prompt, tests        completion ─► program ─► verdict ─► share of passed tests

- `task`: the task, with its parameters and its reward.
- `readers`: rows in the shapes of HumanEval, MBPP, APPS and LiveCodeBench.
- `tests`: the two kinds of tests: of the output, and of calls.
- `program`: finds the program in a completion.
- `verdict`: runs a program against tests.
- `dialogue`: the two ends of a test of calls, in two sandboxes.
- `cores`: permission to use a core of this host.
"""
