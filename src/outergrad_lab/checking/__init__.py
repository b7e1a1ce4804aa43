"""Checks how sites decide whether a step counts, in random executions of a model of it."""
