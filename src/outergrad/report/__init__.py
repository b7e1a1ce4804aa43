"""What a run recorded, as tables for a notebook and as one page to look at."""

from outergrad.report._load import Recording, UnreadableRunError, load

