"""Sites in words: by the names of institutions where they have names, else by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class Site(int):
    """Number of a site, which knows its name. In messages for people only `called` is used."""

    name: str

    def __new__(cls, rank: int, name: str = "") -> Site:
        """Returns the site with this number, and this name if it has one."""
        made = super().__new__(cls, rank)
        made.name = name
        return made

    @property
    def called(self) -> str:
        """The name, or else the number, in words."""
        return self.name or f"site {int(self)}"


@lru_cache
def sites_of(count: int, names: tuple[str, ...]) -> tuple[Site, ...]:
    """Returns so many sites in the order of ranks, with these names if there are any."""
    return tuple(Site(rank, names[rank] if names else "") for rank in range(count))


def called(sites: Sequence[Site]) -> str:
    """Formats several sites."""
    if not sites:
        return "the others"
    if len(sites) == 1 or any(site.name for site in sites):
        return ", ".join(site.called for site in sites)
    return f"sites {', '.join(str(int(site)) for site in sites)}"
