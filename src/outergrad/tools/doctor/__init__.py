"""What is wrong with a machine, or between the sites, and how to mend it."""
