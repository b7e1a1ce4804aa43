"""The audit: attacks on the messages that a site sends, by method and batch size."""
