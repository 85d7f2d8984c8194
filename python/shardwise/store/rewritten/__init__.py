"""Checkpoints seen in another way: renamed, rewritten, converted, of one device, or without a file.

| module | answers |
|---|---|
| `names`, `wanted` | tensors by their new names; tensors as they will be written |
| `left_out` | tensors and values that do not go into another checkpoint |
| `groups` | the groups of an optimizer's parameters, by their new names |
| `components`, `convert` | quantized weights after renames and rewrites; elements of other dtypes |
| `partitions` | how each tensor is cut: weights by rules, components and states as their weights |
| `view` | a checkpoint as rewrites name and store it |
| `ranges` | the bytes that a device reads |
| `model_tensors` | tensors of a configuration, which no checkpoint holds |
"""
