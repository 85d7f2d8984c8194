"""Rewrites worked out from two checkpoints of one model."""
