"""Sites of several ranks each."""
