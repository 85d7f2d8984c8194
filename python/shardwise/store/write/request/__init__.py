"""The verbs: from a request to a plan, and its run.

| module | answers |
|---|---|
| `request` | a request, as one value that checks itself |
| `planner` | from tensors that are wanted to the files of a form |
| `contents` | from tensors and files to a plan |
| `save` | arrays saved |
| `reshape`, `preparation` | checkpoints cut anew, or planned; the way to their plans |
| `values` | values that are not tensors, as a form has them |
| `scratch` | tensors that are put together in a file first |
"""
