"""Recorded runs, as pandas tables for a notebook and as one HTML page."""

from outergrad.report.page import write_page
from outergrad.report.recording import Recording, UnreadableRunError, load

__all__ = ["Recording", "UnreadableRunError", "load", "write_page"]
