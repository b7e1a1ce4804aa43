"""What a run recorded, as tables for a notebook and as one page to look at."""

from outergrad.report._load import Recording, UnreadableRunError, load
from outergrad.report._page import write_page

__all__ = ["Recording", "UnreadableRunError", "load", "write_page"]
