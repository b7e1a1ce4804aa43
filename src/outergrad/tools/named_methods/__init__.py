"""Methods by their names on the command line."""
