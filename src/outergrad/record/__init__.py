"""Reports of a session to its user: coverage, statistics, and recorders of events."""
