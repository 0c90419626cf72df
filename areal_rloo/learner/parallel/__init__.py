"""The learner's ranks on torch.distributed; beside `weights/collective.py` the only code that imports it.

`ranks` connects the processes and sends bytes between rank 0 and the others.
`rows` distributes sequences to rows and ranks, without torch.
`sharding` shards a policy over the ranks (FSDP2) and gathers the whole weights on rank 0.
`files` writes and reads the shards of a checkpoint.
"""
