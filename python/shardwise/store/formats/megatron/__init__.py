"""Megatron's checkpoints: the weights, and the states of its optimizers in each of the ways in which it shards them.

| module | answers |
|---|---|
| `form` | which iteration and which format a folder has |
| `said` | what Megatron says besides tensors: arguments, groups, steps, values |
| `parameters` | which boxes of tensors a rank's parameters are, and where elements of their flat states lie |
| `positions` | where in its buffers a rank has its parameters |
| `buffers`, `coalesced` | the states in buckets; in arrays of all buckets of a rank |
| `grids` | states as grids of flattened parts |
| `torch_dist` | the distributed checkpoints, `torch_dist` |
| `legacy` | the folders of ranks, `mp_rank_TT_PPP` |
"""
