"""Diagnosis of a machine, or of the connections between sites, with remedies."""
