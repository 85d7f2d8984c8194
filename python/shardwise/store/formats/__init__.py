"""The formats that are read.

| module | answers |
|---|---|
| `open` | which format a path has |
| `safetensors/`, `torch/`, `orbax/`, `keras` | formats with tensors of their own |
| `ranks`, `by_rules`, `sharded`, `megatron/` | formats that are made of those |
"""
