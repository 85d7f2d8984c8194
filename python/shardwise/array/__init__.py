"""Arrays cut into shards, and operations on them."""
