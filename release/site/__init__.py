"""What builds the site from docs/ and the docstrings, and what looks at it."""
