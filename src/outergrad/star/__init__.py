"""Sites around a hub: they dial out to it, prove who they are, and send each other nothing else."""
