"""What a site tells the others of itself, and how the sites differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outergrad.tools.doctor.findings import Finding, heard, named, note, ok, problem, warning

_SAME_MATTERS = ("outergrad", "torch")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A site as it describes itself.

    Attributes:
        rank: Its number.
        sites: How many it expects.
        host: The name of its machine.
        interface: That gloo takes there.
        address: Of the interface; where the site listens for the others.
        port: On which it listens.
        versions: Of what is installed, by name.
        findings: What it found about its machine.
    """

    rank: int
    sites: int
    host: str
    interface: str
    address: str
    port: int
    versions: dict[str, str]
    findings: list[Finding]

    @property
    def machine(self) -> str:
        """What tells its machine from others: names alone may be alike."""
        return f"{self.host} {self.address}"

    def told(self) -> dict[str, Any]:
        """The description as JSON can hold it."""
        return {**vars(self), "findings": [finding.told() for finding in self.findings]}


def site_heard(told: dict[str, Any]) -> Site:
    """The description that another site told."""
    return Site(**{**told, "findings": [heard(finding) for finding in told["findings"]]})


def check_versions(sites: Sequence[Site]) -> list[Finding]:
    """Whether all sites have the same versions; names those that differ from most."""
    names = sites[0].versions
    findings = [finding for name in names if (finding := _compare(name, sites))]
    same = [name for name in names if name not in {finding.what for finding in findings}]
    if same:
        said = ", ".join(f"{name} {names[name]}" for name in same)
        findings.insert(0, ok("versions", f"the same at all sites: {said}"))
    return findings


def _compare(name: str, sites: Sequence[Site]) -> Finding | None:
    having: dict[str, list[int]] = {}
    for site in sites:
        having.setdefault(site.versions.get(name, "none"), []).append(site.rank)
    if len(having) == 1:
        return None
    usual = Counter({version: len(ranks) for version, ranks in having.items()}).most_common(1)[0][0]
    odd = [
        f"{named(ranks)} {_has(ranks)} {version}"
        for version, ranks in having.items()
        if version != usual
    ]
    said = f"{'; '.join(odd)} where {named(having[usual])} {_has(having[usual])} {usual}"
    if name in _SAME_MATTERS:
        return problem(name, said, f"install the same version of {name} everywhere")
    return note(name, said, f"training works, but the same {name} everywhere is safer")


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def check_sizes(sites: Sequence[Site]) -> list[Finding]:
    """Whether all sites expect the same number of sites."""
    expected = sites[0].sites
    return [
        problem(
            "meeting",
            f"site {site.rank} expects {site.sites} sites, site {sites[0].rank} {expected}",
            "start all sites with the same number of sites",
        )
        for site in sites
        if site.sites != expected
    ]


def check_sharing(sites: Sequence[Site]) -> list[Finding]:
    """Whether several sites share a machine."""
    machines = Counter(site.machine for site in sites)
    shared = {machine: n for machine, n in machines.items() if n > 1}
    if len(machines) == 1:
        said = f"all sites are on one machine, {sites[0].host}: a rehearsal"
        return [note("machines", said)]
    if not shared:
        return []
    said = ", ".join(f"{n} sites on {machine}" for machine, n in shared.items())
    return [
        warning(
            "machines",
            f"{said}: they share its link to the others",
            "one site per machine exchanges least: use its GPUs within the site",
        )
    ]
