"""Checkpoints compared with one another, and with what they say of themselves.

| module | answers |
|---|---|
| `diff` | what differs between two |
| `prove`, `damage` | whether a checkpoint is what was written; its damage |
| `manifest` | who holds what, as data |
| `memory` | whether devices hold what a checkpoint holds |
"""
