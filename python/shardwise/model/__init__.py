"""Models and variables built under a layout map."""
