"""A session's place among the sites: its transport, and the steps that it has made there."""

from __future__ import annotations

from dataclasses import replace

from outergrad.comm.failure_report import LastStep
from outergrad.commit.participant import CommitParticipant
from outergrad.core.sites import Site
from outergrad.core.transport import Comm
from outergrad.record.stats import Stats
from outergrad.step.transport_state import on_transport


class Membership:
    """The transport of a session, and the number of its synchronised steps.

    Args:
        comm: transport to the other sites.
        number: fingerprint of the session, equal on all sites.

    Attributes:
        comm: the transport; another one after `move`.
        group: the sessions on the transport.
        number: as the argument.
        stats: bytes and seconds of the last synchronised step, and the count of such steps.
        lost_step: step in which sites were lost; None if none was.
        attached: False after `Session.detach`.
    """

    def __init__(self, comm: Comm, number: int) -> None:
        self.comm, self.number = comm, number
        self.group = on_transport(comm.key)
        self.stats = Stats(total_sent_bytes=comm.sent_bytes)
        self.lost_step: int | None = None
        self.attached = True

    @property
    def me(self) -> Site:
        """This site, which knows its name."""
        return self.comm.sites[self.comm.rank]

    @property
    def others(self) -> list[int]:
        """Ranks of the other sites."""
        return [site for site in range(self.comm.world_size) if site != self.comm.rank]

    @property
    def participant(self) -> CommitParticipant | None:
        """Commit participant of this site; None if the transport has no board."""
        return None if self.comm.board is None else self.group.participant

    @property
    def is_lost(self) -> bool:
        """True if the transport must not be used any more."""
        return self.group.lost is not None

    def note_end(self, *, counted: bool) -> None:
        """Notes how the last step ended, for the failure reports of lost sites."""
        self.group.note_end(self.number, LastStep(self.stats.step, counted))

    def lose(self, step: int) -> None:
        """Notes the step in which sites were lost."""
        self.lost_step = step

    def resume(self, step: int) -> None:
        """Continues from a saved step."""
        self.stats = Stats(step=step, total_sent_bytes=self.comm.sent_bytes)
        self.note_end(counted=False)

    def note_exchange(
        self,
        count: int,
        took_part: tuple[str, ...],
        sent: int,
        received: int,
        *,
        by_board: bool,
        waited_s: float,
    ) -> None:
        """Notes an exchange with a quorum, which is no step if not all took part in it.

        Args:
            count: number of such exchanges so far.
            took_part: sites that took part, in words.
            sent: bytes that this site had sent before it.
            received: bytes that this site had received before it.
            by_board: whether it was no step.
            waited_s: seconds that this site had waited until it was known who took part.
        """
        told = {"exchanges": count, "took_part": took_part}
        if by_board:
            sent, received = self.comm.sent_bytes - sent, self.comm.received_bytes - received
            whole = {"total_sent_bytes": self.comm.sent_bytes, "wait_s": waited_s, **told}
            self.stats = Stats(self.stats.step, sent, received, **whole)
        else:
            self.stats = replace(self.stats, wait_s=self.stats.wait_s + waited_s, **told)

    def admit(self, step: int) -> None:
        """Continues from the step that the other sites have reached."""
        self.stats = replace(self.stats, step=step)
        self.note_end(counted=False)

    def move(self, comm: Comm) -> int:
        """Continues on another transport; returns the next step's number there."""
        step = self.stats.step if self.lost_step is None else self.lost_step
        comm.sent_bytes, comm.received_bytes = self.comm.sent_bytes, self.comm.received_bytes
        comm.tap = self.comm.tap
        self.comm, self.group, self.lost_step = comm, on_transport(comm.key), None
        self.stats = replace(self.stats, step=step)
        return step

    def detach(self) -> None:
        """Ends the membership."""
        self.attached = False
