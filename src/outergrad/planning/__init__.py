"""From headers to a plan, and from there to buckets: the same on every site."""
