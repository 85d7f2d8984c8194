"""Plans of whole models: one plan for all tensors, programs for each holder, descriptors.

| module | answers |
|---|---|
| `plan` | plans of whole models |
| `tensors`, `sides` | the tensors of a model with their tilings before and after; the tilings of one side |
| `groups` | tensors that share a plan |
| `program`, `descriptors` | the steps of one holder; the same as plain arrays |
| `rows` | the rows of descriptors, made from the transfers of plans |
| `runner` | messages and partial sums carried out over a transport |
| `transport` | the transport of messages, and the memory of a holder's arrays |
| `converted` | rewrites between two deployments, and their run in memory |
| `memory` | the arrays of a run, none of which shares memory with another; further places of tensors |
"""
