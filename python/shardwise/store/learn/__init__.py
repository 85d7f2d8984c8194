"""Rewrites worked out from two checkpoints of one model.

| module | answers |
|---|---|
| `learn`, `entries` | rewrites from one checkpoint to another, verified; their entries in a rules file |
| `named` | sizes with the names of a configuration |
| `fibers` | runs of equal bytes |
| `relations` | from runs to splits, orders and stacks |
"""
