"""The plan of a step: what follows from the headers of all sites, for steps that are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from outergrad.buckets.bucket import Bucket
from outergrad.core.model import Choice
from outergrad.messages.header import Header
from outergrad.messages.vote import Subjects
from outergrad.step.bucket_view import BucketView
from outergrad.step.transport_state import MessageSequence


@dataclass(frozen=True)
class StepPlan:
    """Plan of a step; the next step follows it if all sites are known to announce the same.

    Attributes:
        headers: predicted headers of all sites, the same object while these are predicted.
        own: this site's header.
        trained: parameters in which this site's backward leaves a gradient.
        rests: True if no layer had anything new to announce.
        choice: how the units travel.
        buckets: messages of the step, in order.
        place: index of the message of each parameter.
        counts: number of trained parameters in each message.
        used: parameters that have a gradient on some site.
        share: as in `StepContext`.
        scale: as in `StepContext`.
        subjects: parameters and buffers that votes can name.
        is_optimistic: True if the step is committed before the votes.
        views: for each message, makes its sums the gradients; empty if steps wait for votes.
        expected: messages whose receives are posted.
        turns: message sequence of the transport.
    """

    headers: Sequence[Header]
    own: Header
    trained: Set[str]
    rests: bool
    choice: Choice
    buckets: Sequence[Bucket]
    place: Mapping[str, int]
    counts: Sequence[int]
    used: frozenset[str]
    share: float
    scale: float
    subjects: Subjects
    is_optimistic: bool
    views: Sequence[BucketView | None]
    expected: Sequence[Bucket]
    turns: MessageSequence
