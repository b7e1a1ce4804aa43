"""Methods as they are named at a command line."""
