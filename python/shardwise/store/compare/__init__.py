"""Checkpoints compared with one another, and with their own digests.

| module | answers |
|---|---|
| `diff`, `values` | the differences of two checkpoints, and of values that are not tensors |
| `prove`, `damage` | whether a checkpoint is unchanged; its damage |
| `manifest` | which files hold which boxes, as data |
| `memory` | whether devices hold the tensors of a checkpoint |
"""
