"""Track which worker must generate each sample, from prompts to complete groups. Imports without torch.

`service` runs the intake on an event loop, for the training thread. `intake` is the state machine: a message in,
changes and replies out. `prompts` is the stream of prompts, `curriculum` draws them by the user's weights, `leasing`
admits groups and grants leases, `fleet` knows the rollout workers, `worker` is one of them, `work` adds up their
counts, `ledger` records the outcome of every sample, `saved_ledger` is the ledger in a checkpoint, `refit` fits a
restored ledger to changed options, `buffer` chooses batches, with the user's `group_filter`. `queues` orders groups by
deadline and workers by room. `answers` records the answers of workers, and `lies` refuses those against their leases.
`evaluation` leases held-out prompts beside training; `eval_sets` are the prompts. `reward_failures` ends a run whose
rewards keep failing.
"""
