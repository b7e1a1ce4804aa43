"""Parts of a model that every site computes again for all sites' rows: no communication here."""
