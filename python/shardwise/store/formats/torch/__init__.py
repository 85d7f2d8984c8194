"""The formats that PyTorch writes, read without PyTorch.

| module | answers |
|---|---|
| `archive`, `pickles` | zip files; pickles as inert records |
| `tensors`, `plain` | the tensors in a container; a `.pt` file |
| `dcp`, `dcp_safetensors` | distributed checkpoints |
| `fsdp`, `universal` | the files of ranks of FSDP; universal folders of DeepSpeed |
"""
