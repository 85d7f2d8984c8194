"""The formats that are read.

| module | answers |
|---|---|
| `open` | a checkpoint of any format, opened |
| `known`, `candidate` | the format of a path, by the table of all; the names and first bytes that tell it |
| `safetensors/`, `torch/`, `orbax/`, `keras` | formats with tensors of their own |
| `hdf5` | the datasets of HDF5 files |
| `ranks`, `by_rules`, `sharded`, `megatron/` | formats whose files have one of those formats |
"""
