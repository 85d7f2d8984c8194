"""Bytes in files and objects, and boxes of them read. Nothing here knows the name of a tensor.

| module | answers |
|---|---|
| `location`, `objects`, `parts` | paths and URLs; objects of stores; files that are parts of a checkpoint |
| `filesystem`, `retries` | filesystems of fsspec; requests made again, and failures that are final |
| `own_folders` | folders that others can write to, opened without links |
| `files`, `object_files`, `mapped` | one open file; objects read as files; arrays mapped from files |
| `engine`, `boxes`, `codecs` | the compiled engine; boxes read; decompression |
| `digest`, `digest_torch` | digests of arrays; of PyTorch's tensors where they lie |
| `sources`, `same_files` | what a plan reads; files that must keep their names |
| `stated_sources` | sources read from a plan file |
| `block_lists` | long lists in compressed blocks with digests |
| `text` | names and shapes from files, checked |
"""
