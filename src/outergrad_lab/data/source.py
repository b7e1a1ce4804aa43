"""What is known of a data set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outergrad_lab.data.dataset import Dataset, Format


@dataclass(frozen=True)
class Original:
    """A file as its authors publish it; gzipped here, where its place has a name of that kind.

    Attributes:
        url: Its address.
        md5: Its checksum; empty where none is known.
    """

    url: str
    md5: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a data set comes from.

    Attributes:
        summary: What it is, in a few words.
        read: Reads it from the folder that holds its files.
        format: What a row of it is.
        files: MD5 checksum of each file it needs; empty where any version will do.
        folder: Folder of the files, if it is not called like the data set.
        url: Folder on the net that holds just these files, if one does.
        originals: Of each file, where there is no such folder, but a file it can be made from.
        made_from: Originals that all files together are made from, where none is one of them.
        convert: Makes the files, from the paths of these originals, in a folder.
        licence: As its authors state it.
        size: Of what is downloaded.
        origin: Where the data is from, and what is to be made of it, for a person to do so.
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
        """Whether a command brings it."""
        return bool(self.url or self.originals or self.made_from)
