"""Warnings of what must not end a training."""

from __future__ import annotations

import logging
import warnings


def warn(message: str) -> None:
    """Warns; where warnings are errors, it is logged instead: other sites would be left alone."""
    try:
        warnings.warn(message, stacklevel=3)
    except Warning:
        logging.getLogger("outergrad").warning(message)
