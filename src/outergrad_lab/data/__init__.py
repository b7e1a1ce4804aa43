"""Data sets: their descriptions, the places of their files, and their readers."""

from outergrad_lab.data.catalogue import (
    SOURCES,
    Source,
    decoder,
    folder_of,
    get_command,
    load,
    missing_files,
    require_files,
    where_to_put,
)
from outergrad_lab.data.dataset import Dataset, Format, synthetic

__all__ = [
    "SOURCES",
    "Dataset",
    "Format",
    "Source",
    "decoder",
    "folder_of",
    "get_command",
    "load",
    "missing_files",
    "require_files",
    "synthetic",
    "where_to_put",
]
