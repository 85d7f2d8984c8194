"""Plans carried out by other systems: MPI ranks."""
