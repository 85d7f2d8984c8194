"""The files of new checkpoints, format by format: what surrounds tensors, and where each lies."""
