"""Plans: the boxes to write, their sources and their places, as data, cut into tasks.

| module | answers |
|---|---|
| `data` | the contents of a plan, in sections |
| `tables`, `grids`, `shares` | tables with named columns; cuts into tasks; the parts of shared files that tasks make |
| `plan` | the plan cut into tasks |
| `file` | plans as files, and the check of one |
"""
