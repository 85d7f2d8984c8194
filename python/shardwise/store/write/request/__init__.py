"""The verbs: from a request to a plan, and its run.

| module | answers |
|---|---|
| `request` | a request, as one value that checks itself |
| `planner` | from tensors that are wanted to a plan |
| `save` | arrays saved |
| `reshape` | checkpoints cut anew, or planned |
| `scratch` | tensors that are put together in a file first |
"""
