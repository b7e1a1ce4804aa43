"""Transports and wire formats; nothing here knows layers or methods."""
