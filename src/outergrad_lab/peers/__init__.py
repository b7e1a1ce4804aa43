"""Methods of other authors, written from their formulas, to be compared with in the same frame."""
