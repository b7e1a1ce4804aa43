"""Statistics of synchronised steps: bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from outergrad.core.transport import Comm


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one weight, with the bias sent along with it, in the last synchronised step.

    Also of another parameter that is sent by itself, or of a block.

    Attributes:
        travels: "factors", "low rank" (sketches, merged triplets), "sparse", "compressed",
            "replayed" or "dense".
        sent_bytes: payload that this site sent for it.
        received_bytes: payload that this site received for it.
        kept_rows: R, the rows that it sent, the width of the sketches or the entries; 0 for others.
        compress_s: seconds from its rows to packed factors.
        replay_s: seconds in which it was replayed for all sites.
    """

    travels: str
    sent_bytes: int = 0
    received_bytes: int = 0
    kept_rows: int = 0
    compress_s: float = 0.0
    replay_s: float = 0.0


class Booking(NamedTuple):
    """Effect of one message on one layer's statistics; constant while messages stay alike.

    Attributes:
        layer: full name of the layer.
        travels: as in `LayerStats`; a dense message besides another does not change the layer's.
        sent: sent bytes.
        received: received bytes.
        rows: as `kept_rows`.
        share: share of the seconds that the message took to make.
    """

    layer: str
    travels: str
    sent: int = 0
    received: int = 0
    rows: int = 0
    share: float = 1.0


class LayerBook(Mapping[str, LayerStats]):
    """Statistics by layer, which are added up only when they are read.

    Attributes:
        compress_s: seconds of all layers from rows to packed factors.
        replay_s: seconds in which blocks were replayed.
    """

    def __init__(self) -> None:
        self.compress_s = self.replay_s = 0.0
        self._booked: list[tuple[Sequence[Booking], float, float]] = []
        self._found: dict[str, LayerStats] = {}

    def forget(self) -> None:
        """Drops all bookings."""
        self.compress_s = self.replay_s = 0.0
        self._booked, self._found = [], {}

    def book(
        self, bookings: Sequence[Booking], *, compress_s: float = 0.0, replay_s: float = 0.0
    ) -> None:
        """Adds the bookings of a message, and the seconds that it took to make."""
        self._booked.append((bookings, compress_s, replay_s))
        self.compress_s += compress_s
        self.replay_s += replay_s

    @property
    def _stats(self) -> dict[str, LayerStats]:
        for bookings, compress_s, replay_s in self._booked:
            for one in bookings:
                self._add(one, compress_s * one.share, replay_s * one.share)
        self._booked.clear()
        return self._found

    def _add(self, one: Booking, compress_s: float, replay_s: float) -> None:
        before = self._found.get(one.layer, LayerStats(one.travels))
        self._found[one.layer] = LayerStats(
            one.travels if before.travels == "dense" else before.travels,
            before.sent_bytes + one.sent,
            before.received_bytes + one.received,
            max(before.kept_rows, one.rows),
            before.compress_s + compress_s,
            before.replay_s + replay_s,
        )

    def __getitem__(self, layer: str) -> LayerStats:
        return self._stats[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stats)

    def __len__(self) -> int:
        return len(self._stats)

    def __repr__(self) -> str:
        return repr(self._stats)


@dataclass(frozen=True)
class Stats:
    """Statistics of this site.

    Attributes:
        step: number of synchronised steps so far.
        sent_bytes: payload and headers that this site sent in the last step.
        received_bytes: payload and headers that it received in the last step.
        total_sent_bytes: bytes sent in all steps, including the start of the session.
        compress_s: seconds in the last step spent on turning rows into factors.
        replay_s: seconds in the last step in which blocks were replayed for all sites.
        wait_s: seconds in the last step in which the training thread waited for other sites.
        layers: statistics of the last step, by full name of a weight, another parameter or a block.
        exchanges: number of exchanges so far with `og.LocalSteps(quorum=...)`, also of those that
            this site was late for, since the session began or a state was loaded; or of exchanges
            with neighbours, with `og.Gossip`; else 0.
        took_part: sites that took part in the last of these, by name, or as "site 0"; with
            `og.Gossip` the neighbours that were heard.
        private_steps: steps that the ledger of `og.Private` has counted, discarded ones included;
            0 without a ledger.
        drift_exchanges: exchanges so far to which a check of `og.OnDrift` has led; else 0.
        drifted: sites whose detectors saw drift at the last of these, by name, or as "site 0"; none
            if it came by `most` alone.
        neighbour_distance: with `og.Gossip`, root mean square over the neighbours heard of the
            Euclidean distance between this site's weights and theirs, before the last exchange
            moved them, as far as its letters told of it; else, and over directed graphs, 0.
    """

    step: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    total_sent_bytes: int = 0
    compress_s: float = 0.0
    replay_s: float = 0.0
    wait_s: float = 0.0
    layers: Mapping[str, LayerStats] = field(default_factory=dict)
    exchanges: int = 0
    took_part: tuple[str, ...] = ()
    private_steps: int = 0
    neighbour_distance: float = 0.0
    drift_exchanges: int = 0
    drifted: tuple[str, ...] = ()

    def counted(self, steps: int) -> Stats:
        """Returns the same, with so many steps in the ledger of privacy."""
        return replace(self, private_steps=steps)

    def drifting(self, exchanges: int, sites: tuple[str, ...]) -> Stats:
        """Returns the same, with so many exchanges on drift, the last on that of these sites."""
        return replace(self, drift_exchanges=exchanges, drifted=sites)


class Since:
    """Bytes that a transport has counted since this object was made, at the beginning of a step."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self._before = comm, (comm.sent_bytes, comm.received_bytes)

    def stats(self, step: int, **more: Any) -> Stats:
        """Returns the statistics of the step; `more` are further fields of `Stats`."""
        total, received = self._comm.sent_bytes, self._comm.received_bytes
        sent_before, received_before = self._before
        return Stats(step, total - sent_before, received - received_before, total, **more)
