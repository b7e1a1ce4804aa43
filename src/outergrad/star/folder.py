"""The folder of a hub: its authority, its certificate, its sites, and its log."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from outergrad._whole_files import write_whole
from outergrad.core.addresses import read_address, read_host
from outergrad.star.authority import (
    DAYS,
    Identity,
    Kit,
    Request,
    new_authority,
    new_hub,
    new_site,
    read_certificate,
    refuse_open_to_others,
    signed_site,
    site_name,
    write_secret,
)
from outergrad.star.journal import note

_KEYS = {"authority": "authority.key", "hub": "hub.key"}
_CERTIFICATES = {"authority": "authority.pem", "hub": "hub.pem"}
_SITES, _ADDRESS, _LOCK = "sites.json", "address", ".lock"


@dataclass(frozen=True)
class Site:
    """A site that was invited.

    Attributes:
        name: in its certificate.
        serial: serial number of its latest certificate; earlier ones are void.
        revoked: whether the site may no longer take part.
    """

    name: str
    serial: int
    revoked: bool = False


class HubFolder:
    """Reads and writes the folder of a hub.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._lock, self._read = threading.Lock(), (0, 0, 0, ())

    def create(self, address: str, hosts: Sequence[str] = ()) -> None:
        """Creates the folder, with a new authority and a new hub.

        Args:
            address: host and port that sites dial, as for `read_address`.
            hosts: other names and addresses by which sites reach the hub, as for `read_host`.

        Raises:
            ValueError: one of them is not valid.
            OSError: the folder is not empty, or cannot be written.
        """
        hub = read_address(address, called="--address=")
        names = [hub.host, *(read_host(host, called="--host=") for host in hosts)]
        self.path.mkdir(0o700, parents=True, exist_ok=True)
        if any(self.path.iterdir()):
            raise FileExistsError(errno.EEXIST, "there is something in it already", str(self.path))
        self.path.chmod(0o700)  # also a folder that was there before, with whatever mode
        authority = new_authority()
        self._write("authority", authority)
        self._write("hub", new_hub(authority, list(dict.fromkeys(names))))
        write_whole(self.path / _ADDRESS, f"{hub}\n")
        self._write_sites([])

    def invite(self, name: str, days: int = DAYS) -> Kit:
        """Makes a kit for a site, which replaces an earlier one.

        Args:
            name: of the site.
            days: validity of the certificate, days.

        Raises:
            ValueError: the name is not valid.
            OSError: this is no folder of a hub.
        """
        authority = self.identity("authority")
        identity = new_site(authority, site_name(name), days)
        with self._changing():
            self._add(Site(name, identity.serial), days)
        return self._kit(name, identity.key, identity.certificate)

    def sign(self, request: Request, days: int = DAYS, replaces: bool = False) -> Kit:
        """Makes a kit without a key, for a site that has made its key itself.

        Args:
            request: of the site.
            days: validity of the certificate, days.
            replaces: whether the kit may replace one that a site of this name has, or had.

        Raises:
            ValueError: there is such a site, and `replaces` is False.
            OSError: this is no folder of a hub.
        """
        certificate = signed_site(self.identity("authority"), request, days)
        with self._changing():
            known = next((site for site in self.sites() if site.name == request.site), None)
            if known is not None and not replaces:
                state = "was revoked" if known.revoked else "has a kit already"
                raise ValueError(
                    f"{request.site!r} {state}: if this request comes from it, and is meant to "
                    "count from now on, pass --replace"
                )
            self._add(Site(request.site, read_certificate(certificate).serial_number), days)
        return self._kit(request.site, "", certificate)

    def _add(self, site: Site, days: int) -> None:
        serial = str(site.serial)  # as text: many readers of JSON round so long a number
        about = {"site": site.name, "serial": serial, "days": days}
        note(self.log_file, self.identity("hub"), "invited", **about)
        self._write_sites(({one.name: one for one in self.sites()} | {site.name: site}).values())

    def _kit(self, name: str, key: str, certificate: str) -> Kit:
        address = (self.path / _ADDRESS).read_text().strip()
        return Kit(name, address, key, certificate, self.authority_certificate)

    @property
    def authority_certificate(self) -> str:
        """Certificate by which sites know the hub, PEM."""
        return (self.path / _CERTIFICATES["authority"]).read_text()

    def revoke(self, name: str) -> None:
        """Revokes a site, which may no longer take part; a running hub notices it.

        Raises:
            ValueError: there is no such site.
            OSError: this is no folder of a hub.
        """
        with self._changing():
            sites = {site.name: site for site in self.sites()}
            if name not in sites:
                raise ValueError(
                    f"no site {name!r} was invited: there are {', '.join(sites) or 'none'}"
                )
            self._write_sites((sites | {name: replace(sites[name], revoked=True)}).values())
            note(self.log_file, self.identity("hub"), "revoked", site=name)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Locks the list of sites: with two writers, an invitation could undo a revocation."""
        path = self.path / _SITES
        with path.open("rb"):  # where this is no folder of a hub, the error names this file
            pass
        opened = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if sys.platform != "win32":
                import fcntl

                fcntl.flock(opened, fcntl.LOCK_EX)
            yield
        finally:
            os.close(opened)

    def sites(self) -> Sequence[Site]:
        """Returns all sites that were invited, in that order."""
        path = self.path / _SITES
        with self._lock:
            now = path.stat()
            key = now.st_mtime_ns, now.st_ino, now.st_size
            if key != self._read[:3]:
                self._read = (*key, tuple(Site(**one) for one in json.loads(path.read_text())))
            return self._read[3]

    def site(self, name: str) -> Site | None:
        """Returns the site of this name; None if it may not take part."""
        return next((s for s in self.sites() if s.name == name and not s.revoked), None)

    def is_revoked(self, name: str) -> bool:
        """True if a site was invited, and then revoked."""
        return any(site.name == name and site.revoked for site in self.sites())

    def identity(self, of: str) -> Identity:
        """Returns the identity of the "authority" or the "hub".

        Raises:
            ValueError: others on this machine may read its key.
            OSError: the identity is not there.
        """
        key, certificate = self.path / _KEYS[of], self.path / _CERTIFICATES[of]
        refuse_open_to_others(key, "the key")
        return Identity(key.read_text(), certificate.read_text())

    def forget_keys(self) -> None:
        """Removes the private keys; the log can still be checked without them."""
        for key in _KEYS.values():
            (self.path / key).unlink(missing_ok=True)

    @property
    def certificate_file(self) -> Path:
        """Certificate of the hub, with which anybody can check the log."""
        return self.path / _CERTIFICATES["hub"]

    @property
    def log_file(self) -> Path:
        """The hub's log."""
        return self.path / "log.jsonl"

    def _write(self, of: str, identity: Identity) -> None:
        write_secret(self.path / _KEYS[of], identity.key)
        write_whole(self.path / _CERTIFICATES[of], identity.certificate)

    def _write_sites(self, sites: Iterable[Site]) -> None:
        told = [vars(site) for site in sites]
        write_whole(self.path / _SITES, json.dumps(told, indent=1) + "\n")
