"""`areal-rloo inspect RUN_FOLDER`: shows trajectories, with rewards, advantages and drops.

In: trajectories.jsonl of a finished or running run. Out: selected trajectories, on the terminal or as JSON lines. The
report uses this package for trajectories.html.

- `__main__`: the command, and the checks of the command line.
- `select`: conditions and orders, and the pass over the records that applies them.
- `text`: trajectories and summaries as text for the terminal.
- `page`: trajectories as a web page, with the script `page.js`.
- `shown`: formats numbers, makes untrusted text visible, and has the common style of the pages.
"""
