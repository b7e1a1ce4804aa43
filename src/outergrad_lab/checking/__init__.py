"""Model checker: random executions of the protocols by which sites decide whether a step counts."""
