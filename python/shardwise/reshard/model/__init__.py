"""Plans of whole models: one plan for all tensors, programs for each holder, descriptors.

| module | answers |
|---|---|
| `plan` | plans of whole models |
| `program`, `descriptors` | the steps of one holder; the same as plain arrays |
| `runner` | how messages and partial sums are carried out over a transport |
| `converted` | rewrites between two deployments |
| `memory` | the arrays of a run: none shares memory with another; further places of tensors |
"""
