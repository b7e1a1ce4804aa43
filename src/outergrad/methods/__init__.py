"""Methods: how gradients travel. A method is a frozen dataclass; its compressor does the work."""
