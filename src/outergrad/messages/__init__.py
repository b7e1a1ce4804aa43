"""What bytes mean: headers, layouts of rows, votes, checksums."""
