"""Summary of a restored checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Summary of what `og.Checkpoints.restore` found.

    Attributes:
        step: number of completed steps when it was saved.
        saved_sites: number of sites that saved it.
        sites: number of sites now.
        lost: number of the saving sites of which nothing is left.
        new: numbers of the present sites of which it holds nothing.
        skipped: newer checkpoints and files that could not be used, and why.
    """

    step: int
    saved_sites: int
    sites: int
    lost: int = 0
    new: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """True if training continues bit for bit as without the interruption."""
        return self.sites == self.saved_sites and not self.lost and not self.new

    def __str__(self) -> str:
        lines = [f"going on after step {self.step}"]
        if self.sites != self.saved_sites:
            lines[0] += f", saved by {self.saved_sites} sites, at {self.sites}"
            lines.append("what the sites had not sent yet is shared out among them")
        if self.lost:
            lines.append(f"what {self.lost} of them had not sent and kept to themselves is lost")
        if self.new:
            names = ", ".join(f"site {number}" for number in self.new)
            lines.append(f"{names}: new, with the others' model and nothing that is a site's own")
        return "; ".join(lines)
