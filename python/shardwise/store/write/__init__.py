"""Checkpoints written: what goes where, moved by the I/O engine, and published as a whole or not at all.

| module | answers |
|---|---|
| `reshape`, `save` | the verbs |
| `plan`, `plan_data`, `planfile` | tasks of a plan; its sections; its file |
| `checkpoint_plan` | the plan that users see |
| `task`, `gather`, `spool` | one task; what it reads into memory; tensors put together first |
| `run`, `work` | the driver; its options and workers |
| `places/` | folders and stores |
"""
