"""The decision whether a step counts, on all sites or on none, and who makes the next one."""
