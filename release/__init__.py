"""What makes a release: wheels, their checks, and the licences of what is linked in."""
