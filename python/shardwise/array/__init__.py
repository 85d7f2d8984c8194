"""Arrays cut into shards, and what is done with them."""
