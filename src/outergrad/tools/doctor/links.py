"""What the measured links mean."""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.tools.doctor.bursts import Rates
from outergrad.tools.doctor.findings import Finding, note, ok, problem
from outergrad.tools.doctor.pairs import Measured

_ASYMMETRIC = 2.0
_SHARED = 0.7
_FAST_BIT_PER_S = 2e9
"""Above this, two busy processors are what is measured."""

_LONG_RTT_S = 0.2
_PARAMETERS = 10_000_000


def check_links(links: Sequence[Measured], sites: int, *, rehearsal: bool) -> list[Finding]:
    """What is wrong with the links, and what they are good for.

    Args:
        links: Of every pair.
        sites: How many sites there are.
        rehearsal: Whether all sites are on one machine.
    """
    findings = [_failed(link, failure) for link in links for failure in link.failures]
    timed = [link for link in links if link.rates]
    findings += _unmeasured([link for link in links if not (link.rates or link.failures)])
    if not timed:
        return findings
    if rehearsal:
        said = "between processes of one machine: no link of a network was measured"
        return [*findings, note("links", said)]
    for link in timed:
        findings += _peculiar(link)
    return findings + _summed_up(timed, sites)


def _unmeasured(links: Sequence[Measured]) -> list[Finding]:
    if not links:
        return []
    pairs = ", ".join(f"{link.lower} and {link.higher}" for link in links)
    return [note("links", f"not measured: sites {pairs}")]


def _failed(link: Measured, failure: str) -> Finding:
    remedy = "let TCP connections between the sites pass, on all ports from 1024, both ways"
    if "stopped" in failure:
        remedy = "look at that site's terminal: a process that was stopped, or a lost network"
    return problem("links", failure, remedy)


def _peculiar(link: Measured) -> list[Finding]:
    assert link.rates
    assert link.rtt_s is not None
    rates, pair = link.rates, f"sites {link.lower} and {link.higher}"
    findings = []
    slow, fast = sorted((rates.alone, rates.alone_back))
    if fast > _ASYMMETRIC * slow and slow < _FAST_BIT_PER_S:
        sender = link.lower if rates.alone == slow else link.higher
        said = f"site {sender} sends {fast / slow:.1f} times slower than it receives, to and from "
        said += f"site {link.higher if sender == link.lower else link.lower}"
        findings.append(note("links", said, "every step waits for the slower way: count on that"))
    if _shared(rates):
        said = f"{pair}: both ways at once carry {rate(rates.both + rates.both_back)} in all, one "
        said += f"at a time {rate(slow)}: they share one channel, as Wi-Fi and some VPNs do"
        findings.append(note("links", said, "a cable instead of Wi-Fi may double the rate"))
    if link.rtt_s > _LONG_RTT_S:
        said = f"{pair}: {1e3 * link.rtt_s:.0f} ms there and back, in every step at least once"
        findings.append(note("links", said, "og.LocalSteps(k) exchanges every k steps alone"))
    return findings


def _shared(rates: Rates) -> bool:
    alone, both = rates.alone + rates.alone_back, rates.both + rates.both_back
    return alone < _FAST_BIT_PER_S and both < _SHARED * alone


def _summed_up(links: Sequence[Measured], sites: int) -> list[Finding]:
    slowest = min(links, key=_slowest)
    rtt_s = max(link.rtt_s or 0.0 for link in links)
    least = _slowest(slowest)
    pair = f"sites {slowest.lower} and {slowest.higher}"
    step_s = ddp_step_s(_PARAMETERS, sites, least, rtt_s)
    hint = f"outergrad plan --link {_option(least)} --latency {_latency(rtt_s)}"
    said = f"{rate(least)} between {pair}"
    said += ", the slowest" if len(links) > 1 else ""
    step = f"a step of DDP with 10 million parameters spends {seconds(step_s)} there"
    return [ok("links", said), note("meaning", step, f"`{hint}` shows what pays")]


def _slowest(link: Measured) -> float:
    assert link.rates
    return link.rates.slowest


def ddp_step_s(parameters: int, sites: int, rate_bit_per_s: float, rtt_s: float) -> float:
    """Seconds that DDP's ring takes for one gradient of 32-bit floats.

    Args:
        parameters: Of the model.
        sites: In the ring.
        rate_bit_per_s: Of the slowest link.
        rtt_s: There and back, the longest.
    """
    hops = 2 * (sites - 1)
    return hops * (32 * parameters / sites / rate_bit_per_s + rtt_s / 2)


def rate(bit_per_s: float) -> str:
    """Writes a rate for a reader, as ``9.6 Mbit/s``."""
    for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bit_per_s >= scale:
            return f"{_digits(bit_per_s / scale)} {unit}"
    return f"{bit_per_s:.0f} bit/s"


def _option(bit_per_s: float) -> str:
    """Writes a rate as an option takes it, as ``9.6mbit``."""
    return rate(bit_per_s).replace(" ", "").removesuffix("/s").lower().replace(",", "")


def _latency(duration_s: float) -> str:
    return f"{1e3 * duration_s:.{1 if duration_s < 0.01 else 0}f}ms"


def _digits(value: float) -> str:
    return f"{value:,.{0 if value >= 9.95 else 1}f}"


def seconds(duration_s: float) -> str:
    """Writes a time for a reader, with two digits that say something."""
    if duration_s < 1:
        return f"{1e3 * duration_s:{'.0f' if duration_s >= 0.0995 else '.2g'}} ms"
    if duration_s >= 120:
        return f"{duration_s / 60:,.1f} minutes"
    return f"{duration_s:,.0f} s" if duration_s >= 9.95 else f"{duration_s:.1f} s"
