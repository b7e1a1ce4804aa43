"""Description of a data set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outergrad_lab.data.dataset import Dataset, Format


@dataclass(frozen=True)
class Original:
    """A file as its authors publish it; gzipped here if only the local name ends in ``.gz``.

    Attributes:
        url: Address of the file.
        md5: Checksum of the file; empty where none is known.
    """

    url: str
    md5: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of a data set, and how to read it.

    Attributes:
        summary: Description in a few words.
        read: Reads it from the folder that holds its files.
        format: Form of one row.
        files: MD5 checksum of each file it needs; empty where any version will do.
        folder: Folder of the files, if it is not called like the data set.
        url: Folder on the net that holds just these files, if one does.
        originals: Original of each file, where there is no such folder.
        made_from: Originals that all files together are made from, where none is one of them.
        convert: Makes the files, from the paths of these originals, in a folder.
        licence: Licence, as its authors state it.
        size: Size of the download.
        origin: Origin of the data and how to make the files, for a person to do so.
    """

    summary: str
    read: Callable[[Path], Dataset]
    format: Format
    files: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    url: str = ""
    originals: Mapping[str, Original] = field(default_factory=dict)
    made_from: Sequence[Original] = ()
    convert: Callable[[Sequence[Path], Path], None] | None = None
    origin: str = ""
    licence: str = "none stated"
    size: str = ""

    @property
    def can_be_fetched(self) -> bool:
        """True if `outergrad data get` can download it."""
        return bool(self.url or self.originals or self.made_from)
