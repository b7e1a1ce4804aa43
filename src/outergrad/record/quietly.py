"""Warnings that never raise."""

from __future__ import annotations

import logging
import warnings


def warn(message: str) -> None:
    """Warns; logs where warnings are errors, since raising would leave other sites waiting."""
    try:
        warnings.warn(message, stacklevel=3)
    except Warning:
        logging.getLogger("outergrad").warning(message)
