"""Sites around a hub: they dial out to it, prove their identity, and communicate through it."""
