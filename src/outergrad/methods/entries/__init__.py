"""Few entries of a gradient: which, how they are written, what is remembered of the others."""
