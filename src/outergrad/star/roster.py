"""The sites of a run that begins now, by the list of invitations, which changes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from outergrad.star.folder import HubFolder, Site


class Roster:
    """The sites that may take part, and those that a new run waits for.

    A site that is invited while the hub serves is waited for from its first call on. So an
    invitation that nobody has used yet holds nobody up.

    Args:
        folder: of the hub.
        sites: names of the only sites that may take part, in rank order; None for all invited ones.
        tell: called with "invited" or "revoked", and the site, when the list has changed.

    Raises:
        ValueError: a site was not invited, or there is none.
    """

    def __init__(
        self,
        folder: HubFolder,
        sites: Sequence[str] | None,
        tell: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self._folder, self._tell, self._lock = folder, tell, threading.Lock()
        self._chosen = None if sites is None else list(sites)
        self._known = {site.name: site for site in folder.sites()}
        self._awaited = set(_checked(self._valid, self._chosen))

    @property
    def _valid(self) -> list[str]:
        return [name for name, site in self._known.items() if not site.revoked]

    def names(self) -> list[str]:
        """Returns the names of the sites that a new run waits for, in rank order."""
        self._look()
        with self._lock:
            valid = self._valid
            order = valid if self._chosen is None else self._chosen
            return [name for name in order if name in self._awaited and name in valid]

    def admits(self, name: str) -> bool:
        """True if an invited site may take part."""
        return self._chosen is None or name in self._chosen

    def note_call(self, name: str) -> None:
        """Notes that a site has called, for which new runs wait from now on."""
        with self._lock:
            self._awaited.add(name)

    def _look(self) -> None:
        with self._lock:
            before, self._known = self._known, {site.name: site for site in self._folder.sites()}
            changed = [_change(before.get(name), site) for name, site in self._known.items()]
        for what, name in (one for one in changed if one is not None):
            self._tell(what, site=name)


def _change(before: Site | None, now: Site) -> tuple[str, str] | None:
    if before == now:
        return None
    return "revoked" if now.revoked else "invited", now.name


def _checked(invited: Sequence[str], sites: Sequence[str] | None) -> Sequence[str]:
    names = invited if sites is None else sites
    if not names:
        raise ValueError("no site is invited yet: `outergrad hub invite SITE` writes a kit")
    for name in names:
        if name not in invited:
            raise ValueError(f"no site {name!r} is invited: there are {', '.join(invited)}")
    return names
