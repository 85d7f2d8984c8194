"""Plans of new checkpoints: data that can be saved, checked, and cut into tasks."""
