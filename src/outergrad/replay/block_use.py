"""Uses of a block's modules, and detection of uses that alone read the previous use's output."""

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
    """One call of a block's module in the forward pass.

    Attributes:
        member: index of the module in the block.
        about: plain values that the replay needs.
        shapes: shapes of the tensors it reads.
        constants: tensors without a gradient, by index, each with its version.
        outputs: shapes of the floating outputs.
        marks: fingerprint of the outputs, if one is sent.
        entry: index of the tensor that is the only output of the previous use; None if none is.
        previous: the use that returned the entry.
        linked: True if no other reader of that output is known, so that its delta follows by
            replay.
        followers: nodes of the uses whose `previous` is this one.
        node: autograd node that runs when the deltas are there.
        kept: tensors it read, from when the deltas have arrived.
        deltas: deltas of the floating outputs.
        entry_delta: gradient of the entry that comes from this use.
        memory: guard of `kept` and `deltas` against overwriting, until they are read.
        is_nothing: True if no output got a gradient; the deltas are then zeros.
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
        """Returns one delta per floating output, with zeros where autograd has none."""
        self.is_nothing = all(delta is None for delta in deltas)
        return [
            torch.zeros(shape.sizes, dtype=shape.dtype, device=device) if delta is None else delta
            for delta, shape in zip(deltas, self.outputs, strict=True)
        ]

    def runs(self) -> bool:
        """True if the current backward pass reaches this use."""
        return will_run(self.node and self.node())

    def tensors(self, read: Sequence[Tensor]) -> list[Tensor]:
        """Returns all tensors the use read: `read`, with the constants inserted by index."""
        rest = iter(read)
        kept = [self.constants.get(k) for k in range(len(self.shapes))]
        return [next(rest) if constant is None else constant[0] for constant in kept]

    def release(self) -> None:
        """Drops the tensors after the step: a loss that is kept may keep the graph alive."""
        self.kept, self.deltas, self.entry_delta, self.memory = [], (), None, None

    def read(self) -> None:
        """Restores the tensors and deltas to their values at the time the deltas arrived.

        Raises:
            OverwrittenError: they have been written to or freed since.
        """
        if self.memory is not None:
            tensors, count = self.memory(), len(self.kept)
            self.kept, self.deltas = list(tensors[:count]), tensors[count:]

    @property
    def as_sent(self) -> SentUse:
        """This use in the form in which a receiver gets it."""
        return SentUse(self.member, self.about, self.kept, *self.marks)


class _Latest(NamedTuple):
    """The only output of the last use. A changed version tells of an in-place operation since."""

    output: ref[Tensor]
    version: int
    use: NodeRef


def use_of(node: NodeRef) -> Use | None:
    """Returns the use that belongs to an autograd node; None once its graph is gone."""
    found = node()
    return None if found is None else found.use


class Following:
    """Learns which uses of a block's modules are the only reader of the previous use's output.

    Args:
        names: full names of the modules.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._latest: _Latest | None = None
        self._sole: dict[tuple[int, int], bool] = {}

    def note(self, use: Use, outputs: Sequence[Tensor]) -> None:
        """Remembers the only output of a use, as a possible input of the next one."""
        assert use.node is not None
        only = outputs[0] if len(outputs) == 1 else None
        self._latest = None if only is None else _Latest(ref(only), only._version, use.node)

    def entry(self, args: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
        """Returns the argument that is the last use's output, and a view to pass in its place.

        The gradient of the view comes from this use alone. An output changed in place since does
        not count: a sum passes its delta on unchanged, so the two could not be told apart.
        """
        latest = self._latest and self._latest.output()
        if latest is None or current_task() != NO_TASK or not any(a is latest for a in args):
            return None
        assert self._latest is not None
        return None if latest._version != self._latest.version else (latest, latest.view_as(latest))

    def link(self, use: Use, seen: Tensor, place: int) -> None:
        """Links a use to the previous one, whose output it reads as the view `seen`.

        Args:
            use: the reader.
            seen: the view that `entry` returned.
            place: index of the view among the tensors of `use`.
        """
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
        """Drops the entry deltas of a backward pass that does not share the deltas of `use`."""
        for follower in map(use_of, use.followers):
            if follower is not None:
                follower.entry_delta = None

    def check(self, use: Use) -> None:
        """Learns whether the delta of the only output came from one follower alone.

        Raises:
            RuntimeError: a follower was sent as the only reader, and is not.
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
    """True if autograd added nothing: a sum has new memory, as long as `other` lives."""
    return other is not None and delta.data_ptr() == other.data_ptr()
