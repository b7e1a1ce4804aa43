"""What a run recorded, as tables for a notebook and as one page to look at."""

from outergrad.report.page import write_page
from outergrad.report.recording import Recording, UnreadableRunError, load

__all__ = ["Recording", "UnreadableRunError", "load", "write_page"]
