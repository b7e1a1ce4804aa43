"""Sessions over sites of several ranks each."""
