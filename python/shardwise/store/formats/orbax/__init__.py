"""Orbax's checkpoints, read without JAX: zarr arrays in a folder or in an OCDBT database.

| module | answers |
|---|---|
| `form` | a checkpoint of Orbax, opened |
| `keyvalue`, `ocdbt` | keys in a folder, or in a database |
| `zarr`, `zarr_metadata` | arrays in chunks; the arrays' metadata |
"""
