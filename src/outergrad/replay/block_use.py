"""Uses of a block's modules, and which of them read the output of the one before alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from outergrad.capture.engine import NO_TASK, current_task, will_run
from outergrad.capture.kept import Kept
from outergrad.capture.node_ref import NodeRef
from outergrad.core.blocks import SentUse
from outergrad.replay.run import Shape


@dataclass(eq=False)
class Use:
    """One use of a block's module.

    Attributes:
        member: which module.
        about: plain values for its replay.
        shapes: of its tensors.
        constants: those that need no gradient, by place, with their versions.
        outputs: shapes of its floating outputs.
        marks: their fingerprint, if it is sent.
        entry: the place of the tensor that is the only output of another use, if one is.
        previous: that use.
        linked: whether nothing else is known to read that output, so that its delta follows.
        followers: the uses that it is the previous of.
        node: what autograd runs when their deltas are there.
        kept: its tensors, from when the deltas have arrived.
        deltas: of its floating outputs.
        entry_delta: what its own replay would give for the entry.
        memory: of these tensors and deltas, until they are read.
        is_nothing: whether its outputs got no gradient at all, for which zeros stand.
    """

    member: int
    about: Any
    shapes: list[Shape]
    constants: dict[int, tuple[Tensor, int]]
    outputs: list[Shape]
    marks: tuple[Tensor, ...] = ()
    entry: int | None = None
    previous: Use | None = None
    linked: bool = False
    followers: list[NodeRef] = field(default_factory=list)
    node: NodeRef | None = None
    kept: list[Tensor] = field(default_factory=list)
    deltas: Sequence[Tensor] = ()
    entry_delta: Tensor | None = None
    memory: Kept | None = None
    is_nothing: bool = False

    def defined(self, deltas: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
        """Deltas as a replay needs them: of zeros where a backward has none for an output."""
        self.is_nothing = all(delta is None for delta in deltas)
        return [
            torch.zeros(shape.sizes, dtype=shape.dtype, device=device) if delta is None else delta
            for delta, shape in zip(deltas, self.outputs, strict=True)
        ]

    def runs(self) -> bool:
        """Whether the current backward reaches it."""
        return will_run(self.node and self.node())

    def tensors(self, read: Sequence[Tensor]) -> list[Tensor]:
        """What it read: those that need a gradient, and the constants in their places."""
        rest = iter(read)
        kept = [self.constants.get(k) for k in range(len(self.shapes))]
        return [next(rest) if constant is None else constant[0] for constant in kept]

    def release(self) -> None:
        """Lets go of what its step is done with: the graph may be kept, as with a loss."""
        self.kept, self.deltas, self.entry_delta, self.memory = [], (), None, None

    def read(self) -> None:
        """Has its tensors and deltas be what they were when its deltas arrived.

        Raises:
            OverwrittenError: they have been written to or freed.
        """
        if self.memory is not None:
            tensors, count = self.memory(), len(self.kept)
            self.kept, self.deltas = list(tensors[:count]), tensors[count:]

    @property
    def as_sent(self) -> SentUse:
        """As if it had travelled."""
        return SentUse(self.member, self.about, self.kept, *self.marks)


class _Latest(NamedTuple):
    """The only output of the last use, as long as it is what the use returned."""

    output: ref[Tensor]
    version: int
    use: NodeRef


def use_of(node: NodeRef) -> Use | None:
    """Whose deltas a node hands on, as long as its graph lives."""
    found = node()
    return None if found is None else found.use


class Following:
    """Learns which uses of a block's modules read the output of the one before, and alone.

    Args:
        names: full names of the modules.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._latest: _Latest | None = None
        self._sole: dict[tuple[int, int], bool] = {}

    def note(self, use: Use, outputs: Sequence[Tensor]) -> None:
        """A use has returned these."""
        assert use.node is not None
        only = outputs[0] if len(outputs) == 1 else None
        self._latest = None if only is None else _Latest(ref(only), only._version, use.node)

    def entry(self, args: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
        """The argument that is the output of the last use, and a view of it in its place.

        What comes back to the view comes from this use alone. An output that was changed in place
        since is another: a sum hands its delta on as it is, and would not be told from it.
        """
        latest = self._latest and self._latest.output()
        if latest is None or current_task() != NO_TASK or not any(a is latest for a in args):
            return None
        assert self._latest is not None
        return None if latest._version != self._latest.version else (latest, latest.view_as(latest))

    def link(self, use: Use, seen: Tensor, place: int) -> None:
        """Notes that a use reads such a view, as its tensor at a place."""
        assert self._latest is not None
        assert use.node is not None
        previous, node = use_of(self._latest.use), use.node
        if previous is None:
            return
        use.entry, use.previous = place, previous
        use.linked = self._sole.get((previous.member, use.member), False)
        previous.followers.append(node)

        def keep(delta: Tensor) -> None:
            here = use_of(node)
            if here is not None:
                here.entry_delta = delta

        seen.register_hook(keep)

    def forget(self, use: Use) -> None:
        """Nothing is learnt of a backward that does not share the deltas of a use."""
        for follower in map(use_of, use.followers):
            if follower is not None:
                follower.entry_delta = None

    def check(self, use: Use) -> None:
        """Learns whether the delta of the only output came from one use alone.

        Raises:
            RuntimeError: it was taken to, and did not.
        """
        followers = [f for f in map(use_of, use.followers) if f is not None]
        ran = [follower for follower in followers if follower.entry_delta is not None]
        for follower in ran:
            sole = len(ran) == 1 and _is_same(use.deltas[0], follower.entry_delta)
            pair = use.member, follower.member
            if use.deltas[0].numel():  # without rows there is nothing to learn
                self._sole[pair] = sole and self._sole.get(pair, True)
            follower.entry_delta = None
            if follower.linked and not sole:
                raise RuntimeError(
                    f"the output of block {self._names[use.member]!r} was read by "
                    f"{self._names[follower.member]!r} alone in the steps before, and is used "
                    f"elsewhere, too, in this one: call optimizer.zero_grad() and go on, both "
                    f"will be sent from now on"
                )


def _is_same(delta: Tensor, other: Tensor | None) -> bool:
    """Whether nothing was added: a sum has memory of its own, as long as `other` lives."""
    return other is not None and delta.data_ptr() == other.data_ptr()
