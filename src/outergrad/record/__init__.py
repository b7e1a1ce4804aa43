"""What a session tells its user: coverage and statistics."""
