"""Data types of outergrad, the protocols between its packages, and figures of a run."""
