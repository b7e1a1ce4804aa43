"""A site's kit: one file with all that it needs to reach the hub and prove its identity."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path

from outergrad.star.authority import (
    Identity,
    check_site,
    fingerprint_of,
    is_key_of,
    read_certificate,
    write_secret,
)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Kit:
    """The kit that `outergrad hub invite` writes, or `outergrad hub sign`, then without the key.

    Attributes:
        site: name of the site.
        hub: host and port of the hub.
        key: private key of the site, PEM; empty if the site has it in a file of its own.
        certificate: of the site, PEM.
        authority: certificate of the authority that signs all others, PEM.
    """

    site: str
    hub: str
    key: str = field(repr=False)
    certificate: str
    authority: str

    @property
    def identity(self) -> Identity:
        """The site's key and certificate."""
        return Identity(self.key, self.certificate)

    @property
    def authority_fingerprint(self) -> str:
        """Fingerprint of the key that signs all certificates of the star."""
        return fingerprint_of(read_certificate(self.authority).public_key())

    def write(self, path: Path) -> None:
        """Writes the kit into a new file that its owner alone may read.

        Raises:
            OSError: the file exists, or cannot be written.
        """
        write_secret(path, json.dumps({"outergrad kit": 1, **vars(self)}, indent=1) + "\n")

    def joined(self, key: str) -> Kit:
        """Returns the kit with the key that the site made itself.

        Raises:
            ValueError: the certificate is not for this key, or not of this site and authority.
        """
        check_site(read_certificate(self.certificate), read_certificate(self.authority), self.site)
        if not is_key_of(key, self.certificate):
            raise ValueError(
                f"the certificate of {self.site!r} is for another key: join it with the key that "
                "`outergrad site request` wrote together with this request"
            )
        return replace(self, key=key)


def read_kit(path: str | os.PathLike[str]) -> Kit:
    """Reads a kit from a file.

    Raises:
        ValueError: there is no file, it cannot be read, it has no key, or others on this machine
            may read it, too.
    """
    kit = read_signed(path)
    refuse_open_to_others(path, "the kit")
    if not kit.key:
        raise ValueError(f"{path} has no key: `outergrad site join` puts it in")
    return kit


def read_signed(path: str | os.PathLike[str]) -> Kit:
    """Reads a kit, which need not have the key, from a file.

    Raises:
        ValueError: there is no file, or it cannot be read.
    """
    try:
        told = json.loads(Path(path).read_text())
        if told.pop("outergrad kit") != 1 or not all(isinstance(one, str) for one in told.values()):
            raise TypeError
        return Kit(**told)
    except OSError as error:
        raise ValueError(f"the kit {path}: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no kit: `outergrad hub invite SITE` writes one") from error


def refuse_open_to_others(path: str | os.PathLike[str], what: str) -> None:
    """Raises if others than its owner may read a file.

    Args:
        path: of the file.
        what: name of the file, for the error.

    Raises:
        ValueError: others on this machine may read the file.
        OSError: the file is not there.
    """
    if os.name == "posix" and os.stat(path).st_mode & _OTHERS:
        raise ValueError(f"others on this machine may read {what} {path}: chmod 600 {path}")
