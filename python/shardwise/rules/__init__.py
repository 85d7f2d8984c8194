"""Layouts by name: rules, their files, and what they say of a model."""
