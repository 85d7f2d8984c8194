"""Tensors and checkpoints as every format gives them.

| module | answers |
|---|---|
| `stored`, `stored_pieces` | a tensor; its pieces |
| `checkpoint` | a checkpoint of any format |
| `lazy` | the tensors of a checkpoint by name, made when they are asked for |
| `training` | weights and training state, by parameter and kind |
| `digests` | digests of tensors, and stated CRC-32 |
| `chunks`, `flat`, `coverage`, `kinds` | grids of chunks; flat ranges; gaps and overlaps; kinds of files |
| `model_config`, `quantized` | `config.json`; quantized weights among the tensors |
| `companion_files`, `headers` | files that go along with a model; digests of what surrounds tensors |
| `notebook` | what notebooks show |
"""
