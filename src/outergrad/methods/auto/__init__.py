"""og.Auto(): methods that are chosen by how long steps take."""

from outergrad.methods.auto.settings import Auto

__all__ = ["Auto"]
