"""Megatron's checkpoints: the weights, and the optimizer's states in each of the ways in which Megatron shards them.

| module | answers |
|---|---|
| `form` | which iteration and which format a folder has |
| `said` | values besides tensors: arguments, groups, steps, others |
| `parameters` | the boxes of tensors that a rank's parameters are, and the places of their flat states |
| `positions` | the place of each parameter in a rank's buffers |
| `buffers`, `coalesced` | the states in buckets; in arrays of all buckets of a rank |
| `grids` | states as grids of flattened parts |
| `torch_dist` | the distributed checkpoints, `torch_dist` |
| `legacy` | the folders of ranks, `mp_rank_TT_PPP`, as one checkpoint |
| `rank_folders` | which folders there are, and the file of each rank |
"""
