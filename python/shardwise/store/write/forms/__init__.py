"""The formats that are written: what surrounds tensors, and where each lies.

| module | answers |
|---|---|
| `forms` | the table of formats that are written |
| `files`, `slots` | files of tensors, and where each tensor lies in them; the boxes in a file |
| `safetensors` | safetensors files, one or several |
| `dcp`, `megatron` | PyTorch's distributed checkpoints; what Megatron-Core looks for next to one |
| `pickles`, `archives` | pickles and zip containers written |
| `torch_file`, `nested` | a file of `torch.save`; the nested dict in it, with models and optimizers |
| `plain_values` | values that every reader of PyTorch accepts |
| `fsdp` | FSDP2's files of ranks, of DTensors |
| `universal` | DeepSpeed's universal checkpoints, a folder for each parameter |
| `rank_files`, `one_rank` | a file for each rank; the part of one rank |
| `doubts`, `engines` | what looks wrong, or is not written; what the loaders of engines would not take |
"""
