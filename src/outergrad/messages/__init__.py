"""Byte formats of messages: headers, layouts of payloads, votes, checksums."""
