"""The only driver of a plan, and the plan as users see it.

| module | answers |
|---|---|
| `run` | tasks run, receipts collected, the end |
| `checkpoint_plan` | the plan that users see |
"""
