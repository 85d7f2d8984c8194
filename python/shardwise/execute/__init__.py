"""Plans carried out by other systems: MPI ranks, processes of PyTorch.

| module | answers |
|---|---|
| `mpi`, `torch` | programs run over MPI and PyTorch |
| `_ranks` | devices as ranks of a communicator; what all ranks agree on first |
"""
