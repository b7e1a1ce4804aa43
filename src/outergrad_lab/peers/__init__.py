"""Methods of other authors, written from their formulas, for comparison in the same framework."""
