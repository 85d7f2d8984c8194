"""Pictures of tilings and plans."""
