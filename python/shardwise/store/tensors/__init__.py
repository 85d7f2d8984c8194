"""Tensors and checkpoints, in the form that every format's reader returns.

| module | answers |
|---|---|
| `stored`, `stored_pieces` | a tensor; its pieces |
| `checkpoint` | a checkpoint of any format |
| `lazy` | the tensors of a checkpoint by name, made when they are asked for |
| `training` | weights and training state, by parameter and kind |
| `digests` | digests of tensors, and stated CRC-32 |
| `chunks`, `flat`, `coverage`, `kinds` | grids of chunks; flat ranges; gaps and overlaps; kinds of files |
| `model_config` | `config.json` |
| `companion_files`, `headers` | files that are copied along with a model; digests of the bytes around tensors |
| `notebook` | views in notebooks |
"""
