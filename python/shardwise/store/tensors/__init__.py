"""The tensors that are wanted: from which pieces they are made, under which names, how cut.

| module | answers |
|---|---|
| `assembled`, `arrange` | what a tensor is made of: a tree, and the pieces of any box; dims split, permuted, merged |
| `rewrite`, `weights` | rewrites of tensors, and of quantized weights |
| `wanted`, `names` | tensors to be written; their new names |
| `components` | quantized weights that are cut |
| `convert` | elements of other dtypes |
| `one_rank` | the part of one rank |
| `doubts` | what looks wrong, or does not arrive |
| `engines` | what the sharded loaders of engines would not take |
"""
