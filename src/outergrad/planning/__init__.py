"""The plan of a step: from the headers of all sites to buckets, the same on every site."""
