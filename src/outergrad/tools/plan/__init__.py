"""Predicts what methods would send, and how long a step would take, before there are sites."""
