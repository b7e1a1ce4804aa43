"""Downloads of the files of a data set."""

import gzip
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from rich.progress import Progress

from outergrad._whole_files import whole_file
from outergrad.launch.errors import RecipeError
from outergrad_lab.data.catalogue import Original, Source
from outergrad_lab.data.files import DamagedFileError

TIMEOUT_S = 30
CHUNK_BYTES = 1 << 16
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def download(source: Source, folder: Path, progress: Progress, url: str = "") -> list[str]:
    """Downloads the files of a data set into a folder, unless they are there already.

    A file appears under its name only when it is complete and its checksum, if any, is right.

    Args:
        source: The data set.
        folder: Folder for its files.
        progress: Shows a bar for each file.
        url: Folder on the net to use instead of ``source.url``.

    Returns:
        The names of the files that were downloaded.

    Raises:
        RecipeError: The net, a checksum or the disk prevents it. Or the address is not of https,
            so that anybody on the way could have changed the files.
    """
    wanted = [name for name, md5 in source.files.items() if not _is_right(folder / name, md5)]
    if wanted and source.made_from and not url:
        _make(source, wanted, folder, progress)
        return wanted
    for name in wanted:
        original = _original(source, name, url)
        _fetch(original.url, folder / name, original.md5, progress)
    return wanted


def _make(source: Source, wanted: list[str], folder: Path, progress: Progress) -> None:
    """Makes files from their originals, in a hidden folder that is removed at the end."""
    assert source.convert is not None
    originals: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
            place = Path(unfinished)
            originals = [place / f"original-{Path(one.url).name}" for one in source.made_from]
            for one, path in zip(source.made_from, originals, strict=True):
                _fetch(one.url, path, one.md5, progress, put=f"{', '.join(wanted)} into {folder}")
            source.convert(originals, place)
            for name in wanted:
                os.replace(place / name, folder / name)
    except DamagedFileError as error:
        url = source.made_from[originals.index(error.path)].url
        reason = " ".join(str(error.__cause__).split())
        raise RecipeError(
            f"{url} is not what it was ({reason}), nothing kept: put "
            f"{', '.join(wanted)} into {folder} yourself, or use --url"
        ) from error
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(path: Path, error: OSError) -> RecipeError:
    return RecipeError(f"cannot write {path} ({error.strerror}): mend it or use --data-dir")


def _original(source: Source, name: str, url: str) -> Original:
    """Returns the origin of a file: in the requested folder on the net, or its own address."""
    base = url or source.url
    if not base:
        return source.originals[name]
    return Original(urljoin(base.rstrip("/") + "/", name), source.files[name])


def _refuse_unprotected(url: str) -> None:
    """Raises unless the address is of https, a file, or http on this machine."""
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in _THIS_MACHINE:
        raise RecipeError(
            f"{url} is not protected: what is read from it may have been changed on the way; use "
            f"an https:// address as --url, or bring the files to this machine and use file://"
        )


class _Redirects(HTTPRedirectHandler):
    """Follows redirects, but not from https to http."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        _refuse_unprotected(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_right(path: Path, md5: str) -> bool:
    if not path.is_file():
        return False
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False)
    return md5 in ("", digest.hexdigest())


def _fetch(url: str, path: Path, md5: str, progress: Progress, put: str = "") -> None:
    put = put or f"{path.name} into {path.parent}"
    with _atomic(path) as target, ExitStack() as stack:
        file, digest = target, hashlib.md5(usedforsecurity=False)
        if path.suffix == ".gz" and not url.endswith(".gz"):
            file = stack.enter_context(gzip.GzipFile(fileobj=target, mode="wb", mtime=0))
        for chunk in _chunks(url, path, progress, put):
            digest.update(chunk)
            file.write(chunk)
        if md5 not in ("", digest.hexdigest()):
            raise RecipeError(
                f"{url}: checksum {digest.hexdigest()} instead of {md5}, nothing kept: "
                "try again or another --url"
            )


def _chunks(url: str, path: Path, progress: Progress, put: str) -> Iterator[bytes]:
    _refuse_unprotected(url)
    try:
        with build_opener(_Redirects).open(url, timeout=TIMEOUT_S) as reply:
            size = reply.headers.get("Content-Length")
            left = int(size or 0)
            task = progress.add_task(path.name, total=int(size) if size else None)
            while chunk := reply.read(CHUNK_BYTES):
                yield chunk
                progress.advance(task, len(chunk))
                left -= len(chunk)
            if size and left:
                raise OSError(f"it broke off, {left} bytes are missing")
    except (OSError, HTTPException, ValueError) as error:
        raise RecipeError(
            f"cannot download {url} ({str(error).strip('<>')}): try again, another --url, "
            f"or put {put} yourself"
        ) from error


@contextmanager
def _atomic(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces ``path`` if all goes well."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise _unwritable(path, error) from error
