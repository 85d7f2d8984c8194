"""The formats that are read.

| module | answers |
|---|---|
| `open` | a checkpoint of any format, opened |
| `known` | the table of formats, recognised by names and first bytes |
| `safetensors/`, `torch/`, `orbax/`, `keras` | formats with tensors of their own |
| `hdf5` | the datasets of HDF5 files |
| `ranks`, `by_rules`, `sharded`, `megatron/` | formats whose files have one of those formats |
"""
