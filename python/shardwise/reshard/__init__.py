"""Going from one tiling of a tensor to another: what must move, what it costs, and moving it."""
