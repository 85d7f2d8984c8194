"""The only driver of a plan, and the plan as users see it.

| module | answers |
|---|---|
| `run`, `ledger` | tasks run, and the end; what follows from their receipts |
| `checkpoint_plan` | the plan that users see |
"""
