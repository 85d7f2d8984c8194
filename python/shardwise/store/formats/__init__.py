"""The files of new checkpoints, format by format: what surrounds tensors, and where each lies.

| module | answers |
|---|---|
| `files` | files of tensors, and where each tensor lies in them |
| `slots` | the boxes in a file |
| `dcp`, `pickles` | PyTorch's distributed checkpoints; pickles written |
| `rank_files` | a file for each rank |
| `forms` | the table of formats that are written |
"""
