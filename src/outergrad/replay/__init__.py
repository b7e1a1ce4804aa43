"""Blocks: parts of a model that every site replays for all sites' rows. No communication here."""
