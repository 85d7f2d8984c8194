"""Who holds what, drawn."""
