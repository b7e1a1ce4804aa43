"""What a user of the library runs: plan, doctor, watch, report."""
