"""The nouns of outergrad and the protocols between its rooms: no behaviour."""
