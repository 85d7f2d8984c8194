"""Plans carried out by other systems: MPI ranks, processes of PyTorch, transports that take addresses.

| module | answers |
|---|---|
| `mpi`, `torch` | programs run over MPI and PyTorch |
| `communicator` | communicators of MPI, and messages between their ranks |
| `transports` | rows of addresses, as NIXL and Mooncake take them |
| `address_table` | the same rows as a table |
| `reads` | reads of files and objects, as `preadv` and HTTP take them |
| `versions` | the plan, the version and the memory that two sides agree on |
| `_ranks` | devices as ranks of a communicator; what all ranks agree on first |
"""
