"""The one driver of plans, and the plan as users see it.

| module | answers |
|---|---|
| `run`, `ledger` | tasks run, and the end; the contents that follow from their receipts |
| `checkpoint_plan` | the plan that users see |
"""
