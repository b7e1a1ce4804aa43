"""``outergrad watch``: what a run writes, as a picture in the terminal."""
