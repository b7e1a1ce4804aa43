"""Command-line tools of the library: plan, doctor, watch, report, hub and site."""
