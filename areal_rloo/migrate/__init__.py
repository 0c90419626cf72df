"""`areal-rloo migrate FILE`: the settings of AReaL, verl, TRL or ms-swift, as a config of areal_rloo.

    file ─► `reading`: system and settings ─► `rules`: a rule for each setting ─► `translate`: our options, and a report

- `reading`: reads the settings of a YAML file or a Python script; `shell` those of a shell script.
- `rules`: the form of a rule, and the words for settings without a counterpart.
- `areal`, `verl`, `trl`: the rules for the settings of each system; ms-swift shares the names of TRL, whose batches and
  steps are in `trl_steps`, whose rewards in `trl_rewards`, and whose algorithm in `trl_trainer`.
- `translate`: applies the rules, and checks the result.
- `__main__`: the command.
"""
