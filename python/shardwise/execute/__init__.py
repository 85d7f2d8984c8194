"""Plans carried out by others' machinery: MPI ranks."""
