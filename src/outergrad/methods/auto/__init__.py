"""og.Auto(): methods that are chosen by how long steps take."""
