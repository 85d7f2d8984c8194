"""The formats that PyTorch writes, read without PyTorch.

| module | answers |
|---|---|
| `archive`, `pickles` | zip files; pickles as inert records |
| `tensors`, `plain` | the tensors in a container; a `.pt` file |
| `state_dicts`, `optimizers` | what files hold by name; which parameter a number of an optimizer is |
| `training` | what lies beside a model: optimizers, schedulers, random states |
| `dcp`, `dcp_safetensors` | distributed checkpoints |
| `fsdp`, `fsdp_states` | the files of ranks of FSDP; their optimizers, and random states |
| `rank_parts`, `flat_units` | what a rank's value is a part of; flat parameters, taken apart |
| `universal`, `deepspeed`, `deepspeed_files` | DeepSpeed's universal folders and its own, and the files of these |
| `zero_partitions`, `model_parallel`, `flat_parts` | flat partitions; cuts among ranks; tensors of both |
"""
