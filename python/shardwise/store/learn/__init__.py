"""Rewrites worked out from two checkpoints of one model, and rules worked out from recordings.

| module | answers |
|---|---|
| `learn`, `entries` | rewrites from one checkpoint to another, verified; their entries in a rules file |
| `recorded` | rules of an engine, from what its loader did for models of several sizes |
| `numbered`, `candidates` | recorded models as checkpoints of element numbers; entries that rules may have |
| `staged` | which ranks have a parameter at all: stages, experts; the file that says it |
| `type_tensors`, `experiments`, `facts` | a type's tensors, from experiments with its configuration |
| `named` | sizes with the names of a configuration |
| `fibers` | runs of equal bytes |
| `relations`, `dims` | from runs to splits, orders and stacks; the words of a rewrite for dims |
"""
