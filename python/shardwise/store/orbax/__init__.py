"""Orbax's checkpoints, read without JAX: zarr arrays in a folder or in an OCDBT database."""
