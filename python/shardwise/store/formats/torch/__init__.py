"""The formats that PyTorch writes, read without PyTorch.

| module | answers |
|---|---|
| `archive`, `pickles` | zip files; pickles as inert records |
| `tensors`, `plain` | the tensors in a container; a `.pt` file |
| `state_dicts`, `optimizers` | values of files by name; the parameter that an optimizer's number stands for |
| `training` | files next to a model: optimizers, schedulers, random states |
| `dcp`, `dcp_safetensors` | distributed checkpoints |
| `fsdp`, `fsdp_states` | the files of ranks of FSDP; their optimizers |
| `run_values` | random states and other values of a run, in the same files |
| `items`, `item_index` | the folders of `torch_checkpointing`; their index |
| `rank_parts`, `flat_units` | ranks' parts of tensors; flat parameters, divided into parameters |
| `placed_states` | how tensors of ranks are cut, as their pickles state it |
| `universal`, `deepspeed`, `deepspeed_files` | DeepSpeed's universal folders; its own folders, and their files |
| `zero_states` | states that are whole in DeepSpeed's files |
| `zero_partitions`, `model_parallel`, `flat_parts` | flat partitions; cuts among ranks; tensors of both |
"""
