"""Plans carried out by other systems: MPI ranks, processes of PyTorch."""
