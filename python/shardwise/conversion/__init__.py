"""Tensors made of other tensors: stored ones split into parts, rearranged, combined. This package reads no file.

| module | answers |
|---|---|
| `tables` | where a tensor's elements are; tensors to write |
| `assembled`, `leaves` | trees of operations on tensors, and the pieces of any box |
| `arrange` | dims split, permuted, merged |
| `weights` | the same for quantized weights, component by component |
| `combined` | tensors put together, quantized or not: replicas, stacks, packed dims |
| `trained` | the same for weights with states of an optimizer |
| `moments` | one state of a weight |
| `apply`, `sides` | rewrites applied to tensors by name; the effect of each side of a rewrite |
"""
