r"""Observers of a private training, and the noise that each of them cannot take away.

A row of one site changes the sum of clipped gradients by C at most. Site s adds its own noise
n_s ~ N(0, σ²C²/S), independently, so the sum of all S sites has noise N(0, σ²C²). Whoever sees
more than the sum, or knows a part of the noise, is left with less:

| observer | what it sees | noise that it does not know, over C |
|---|---|---|
| whoever gets the model | the sums | σ |
| t other sites, of a sum | the sums, and its own n_s | σ √((S − t) / S) |
| other sites, of open messages | each site's message, with n_s alone | σ √(1 / S) |
| the hub, of masked sums | the sums at most | σ |
| the hub that adds up, or has open messages | each site's message | σ √(1 / S) |

The second: n = Σ_s n_s, of which t terms are known, has a variance of (S − t) σ²C²/S left. With
t = S − 1 that is what an open message has: all others together can subtract themselves.
A hub that puts together with sites what they know is one of these sites.
"""

from __future__ import annotations

from math import sqrt
from typing import Literal

from outergrad.core.transport import Sums

Observer = Literal["model", "site", "hub"]
"""Who might learn of a row."""

OBSERVERS: dict[Observer, str] = {
    "model": "whoever gets the model",
    "site": "another site",
    "hub": "the hub, if there is one",
}
"""Observers in words."""
SUMS: dict[Sums, str] = {
    "masked": "sums masked",
    "trusted": "sums by a trusted hub",
    "open": "messages open",
}
"""Kinds of sums in words."""


def noise_seen(
    noise: float, observer: Observer, *, sites: int, sums: Sums, colluding: int = 1
) -> float:
    """Returns the noise against an observer, in units of the clip.

    Args:
        noise: σ, standard deviation of the noise in the sum over all sites, over the clip C.
        observer: who looks.
        sites: S, how many sites add noise.
        sums: "masked" where nobody sees a site's own message, "trusted" where only the hub does,
            "open" where other sites do.
        colluding: t, how many sites put together what they know.

    Raises:
        ValueError: there are no such sites.
    """
    if observer not in OBSERVERS:
        raise ValueError(f"observer must be one of {', '.join(OBSERVERS)}, not {observer!r}")
    if sums not in SUMS:
        raise ValueError(f"sums must be one of {', '.join(SUMS)}, not {sums!r}")
    if observer == "model" or (observer == "hub" and sums == "masked"):
        return noise
    if observer == "site" and not 1 <= colluding < sites:
        raise ValueError(
            f"observer='site' with colluding={colluding}: somebody must be left to look at; pass "
            f"colluding= from 1 to {sites - 1}"
            if sites > 1
            else "observer='site': there is one site, and no other: pass observer='model'"
        )
    sees_a_message = observer == "hub" or sums == "open"
    unknown = 1 if sees_a_message else sites - colluding
    return noise * sqrt(unknown / sites)
