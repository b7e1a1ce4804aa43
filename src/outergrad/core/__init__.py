"""Data types of outergrad and the protocols between its packages; contains no behaviour."""
