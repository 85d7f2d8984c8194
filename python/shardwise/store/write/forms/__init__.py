"""The formats that are written: what surrounds tensors, and where each lies.

| module | answers |
|---|---|
| `forms` | the table of formats that are written |
| `files`, `slots` | files of tensors, and where each tensor lies in them; the boxes in a file |
| `safetensors` | safetensors files, one or several |
| `dcp`, `megatron` | PyTorch's distributed checkpoints; what Megatron-Core looks for beside one |
| `pickles` | pickles written |
| `rank_files`, `one_rank` | a file for each rank; the part of one rank |
| `doubts`, `engines` | what looks wrong, or does not arrive; what the loaders of engines would not take |
"""
