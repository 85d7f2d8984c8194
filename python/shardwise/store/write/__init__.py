"""Checkpoints written: what goes where, moved by the I/O engine, and published as a whole or not at all.

| module | answers |
|---|---|
| `request/` | the verbs |
| `run/` | the driver, and the plan that users see |
| `plan/` | plans as data, and as files |
| `places/` | folders and stores; tasks, what they read, and how they are run |
| `forms/` | formats that are written |
"""
