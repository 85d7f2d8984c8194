"""Plans of whole models: one plan for all tensors, programs for each holder, descriptors.

| module | answers |
|---|---|
| `plan` | plans of whole models |
| `program`, `descriptors` | the steps of one holder; the same as plain arrays |
| `converted` | rewrites between two deployments |
| `memory` | the arrays of a run: none shares memory with another; further places of tensors |
"""
