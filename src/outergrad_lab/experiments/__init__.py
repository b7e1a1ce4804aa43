"""The paper's experiments: each from one command, from its YAML, on real data."""
