"""Files of `torch.save` that another site sent: read only if they are no longer than they look."""

from __future__ import annotations

import io
import zipfile


def refuse_compressed(content: bytes) -> None:
    """Checks an archive before it is read: `torch.save` compresses nothing.

    A compressed one of 131 kB can take 134 MB of memory.

    Raises:
        ValueError: it is no archive, or one that takes more memory than there are bytes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise ValueError(f"it is no file of torch.save: {error}") from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed, as torch.save never does")
    if sum(entry.file_size for entry in entries) > len(content):
        raise ValueError("it says that it holds more bytes than it has")
