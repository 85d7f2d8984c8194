"""The verbs: from a request to a plan, and its run.

| module | answers |
|---|---|
| `request` | a request, as one value that checks itself |
| `planner` | from the tensors of the new checkpoint to the files of a form |
| `contents` | from tensors and files to a plan |
| `save` | arrays in memory saved as a checkpoint |
| `reshape`, `preparation` | checkpoints resharded, or planned; the steps from a request to a plan |
| `values` | values that are not tensors, as a form has them |
| `scratch` | tensors that are converted in a temporary file first |
"""
