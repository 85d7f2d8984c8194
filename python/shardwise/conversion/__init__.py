"""Tensors made of other tensors: stored ones taken apart, arranged anew, put together. Nothing here reads a file.

| module | answers |
|---|---|
| `assembled`, `leaves` | a tree of what is done to which, and the pieces of any box |
| `arrange` | dims split, permuted, merged |
| `weights`, `trained` | the same of quantized weights, component by component; of weights with states of an optimizer |
| `moments` | one state of a weight |
| `apply`, `sides` | rewrites applied to tensors by name; what each side does to them |
"""
