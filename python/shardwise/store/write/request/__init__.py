"""The verbs: from a request to a plan, and its run.

| module | answers |
|---|---|
| `save` | arrays saved; the planner of both verbs |
| `reshape` | checkpoints cut anew, or planned |
| `spool` | tensors that are put together in a file first |
"""
