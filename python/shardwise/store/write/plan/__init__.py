"""Plans: what is written where, as data, cut into tasks.

| module | answers |
|---|---|
| `data` | what a plan says, in sections |
| `tables`, `grids`, `shares` | tables with named columns; cuts into tasks; what tasks make of shared files |
| `plan` | the plan cut into tasks |
| `file` | plans as files, and the check of one |
"""
