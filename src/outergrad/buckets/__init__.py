"""What one collective carries: a program per file."""
