"""Where checkpoints are written, until they have their names."""
