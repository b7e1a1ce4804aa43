"""Sites around a hub: they dial out to it, prove their identity, and communicate through it."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its own lines would hide those for people
