"""A site's kit: one file with all that it needs to reach the hub and prove who it is."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from outergrad.star.authority import Identity, write_secret

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Kit:
    """What `outergrad hub invite` writes.

    Attributes:
        site: its name.
        hub: host and port.
        key: private key of the site, PEM.
        certificate: of the site, PEM.
        authority: certificate of whoever signs them all, PEM.
    """

    site: str
    hub: str
    key: str
    certificate: str
    authority: str

    @property
    def identity(self) -> Identity:
        """Key and certificate."""
        return Identity(self.key, self.certificate)

    def write(self, path: Path) -> None:
        """Into a file that its owner alone may read.

        Raises:
            OSError: it is there, or cannot be written.
        """
        write_secret(path, json.dumps({"outergrad kit": 1, **vars(self)}, indent=1) + "\n")


def read_kit(path: str | os.PathLike[str]) -> Kit:
    """From a file.

    Raises:
        ValueError: there is none, it cannot be read, or others on this machine may read it, too.
    """
    try:
        if os.name == "posix" and os.stat(path).st_mode & _OTHERS:
            raise ValueError(f"others on this machine may read the kit {path}: chmod 600 {path}")
        told = json.loads(Path(path).read_text())
        if told.pop("outergrad kit") != 1:
            raise ValueError
        return Kit(**told)
    except OSError as error:
        raise ValueError(f"the kit {path}: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no kit: `outergrad hub invite SITE` writes one") from error
