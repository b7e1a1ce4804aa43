"""Training without a centre: graphs of sites, and what neighbours tell each other."""
