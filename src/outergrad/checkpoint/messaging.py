"""Messages of any length between sites, over the transport of a session."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outergrad._whole_files import load_plain
from outergrad.core.sites import Site
from outergrad.core.transport import Comm
from outergrad.messages.raw import as_tensor

_END = b"\0"
"""Last byte of every message, so that none is empty."""


def gathered(comm: Comm, value: Any) -> list[Any]:
    """All-gathers a JSON value; returns the values by rank.

    Raises:
        ValueError: on all sites: a site sent something else.
    """
    message = _message(json.dumps(value).encode())
    lengths = comm.all_gather(torch.tensor([len(message)]), [1] * comm.world_size).wait()
    parts = comm.all_gather(message, [int(length) for length in lengths]).wait()
    return [_value(site, part) for site, part in zip(comm.sites, parts, strict=True)]


def swapped(comm: Comm, letters: Sequence[bytes]) -> list[bytes]:
    """Sends a message to every site (all-to-all); returns the messages for this site, by rank.

    Args:
        comm: the transport.
        letters: messages for each site, by rank; may be empty.
    """
    parts = [_message(letter) for letter in letters]
    mine = torch.tensor([len(part) for part in parts])
    lengths = comm.all_gather(mine, [comm.world_size] * comm.world_size).wait()
    found = comm.all_to_all(parts, [int(of_site[comm.rank]) for of_site in lengths]).wait()
    return [_content(part) for part in found]


def packed(value: Any) -> bytes:
    """Serialises containers of tensors, numbers and text."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(content: bytes) -> Any:
    """Deserialises the bytes of `packed`.

    Raises:
        ValueError: they would take more memory than there are bytes, or have another content.
    """
    refuse_compressed(content)
    return load_plain(io.BytesIO(content))


def _value(site: Site, part: Tensor) -> Any:
    try:
        return json.loads(_content(part))
    except ValueError as error:
        raise ValueError(f"Checkpoints: {site.called} sent what is no JSON: {error}") from error


def _message(content: bytes) -> Tensor:
    return as_tensor(content + _END)


def _content(message: Tensor) -> bytes:
    return message.cpu().numpy().tobytes()[: -len(_END)]


def refuse_compressed(content: bytes) -> None:
    """Raises if an archive is compressed: `torch.save` compresses nothing.

    A compressed archive of 131 kB can take 134 MB of memory.

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
