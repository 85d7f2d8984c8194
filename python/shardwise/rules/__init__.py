"""Layouts by name: rules, their files, and what they say about a model."""
