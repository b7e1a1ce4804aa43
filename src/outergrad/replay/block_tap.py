"""Blocks in autograd: traced in the forward pass, captured in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outergrad.capture.class_swap import ClassSwap
from outergrad.capture.engine import NO_TASK, current_task
from outergrad.capture.kept import Alarm, Keeper
from outergrad.capture.node_ref import NodeRef
from outergrad.capture.parameters import OwnParameters, WatchedParameter, is_shared, is_wanted
from outergrad.capture.tap import BlockTap
from outergrad.capture.untappable import may_be_tapped
from outergrad.core.blocks import UNSENDABLE, Block, Replayer, SentRun, SentUse
from outergrad.core.coding import Codecs
from outergrad.core.errors import RefusedError, ReplayError
from outergrad.linalg.gradients import vjp
from outergrad.replay.block_use import Following, Shape, Use, use_of
from outergrad.replay.fingerprint import unrepeated


@dataclass(frozen=True)
class FoundBlock:
    """A block of a model, before a session taps it.

    Attributes:
        block: its name and parameters.
        names: full names of its modules.
        modules_of: for each callable module, the modules it consists of.
        params_of: for each callable module, the full names of its trained parameters.
        replayer: computes and replays the modules.
        codecs: encode the floating tensors that are sent.
        explicit: True if the user named the block; it is then an error if it may not be sent.
        raw_inputs: True if a module may be sent that reads only the model's own input.
        swap: swaps the classes of its modules, or of their host.
    """

    block: Block
    names: tuple[str, ...]
    modules_of: Sequence[Sequence[nn.Module]]
    params_of: Sequence[Sequence[str]]
    replayer: Replayer
    codecs: Codecs
    explicit: bool
    raw_inputs: bool
    swap: Callable[[TappedBlock], None]


class BlockSink(Protocol):
    """Receiver of a block's events."""

    def taps_block(self, block: Block) -> bool:
        """True if the block's uses should be captured in this forward pass."""
        ...

    def on_use(self, block: Block, use: Use) -> None:
        """Called when the deltas of a use have arrived."""
        ...


class TappedBlock:
    """Block of a model while a session is attached.

    Args:
        found: the block.
        watched: its parameters, for each callable module.
        sink: receives the block's events.
        alarm: alarm of the model; None creates one for this block alone.
    """

    def __init__(
        self,
        found: FoundBlock,
        watched: Sequence[Sequence[WatchedParameter]],
        sink: BlockSink,
        alarm: Alarm | None = None,
    ) -> None:
        self.block, self.replayer, self.codecs = found.block, found.replayer, found.codecs
        self._names, self._watched, self._sink = found.names, watched, sink
        self._raw_inputs, self._explicit = found.raw_inputs, found.explicit
        self._own = [OwnParameters(*pair) for pair in zip(found.modules_of, watched, strict=True)]
        numels = [sum(w.parameter.numel() for w in params) for params in watched]
        pairs = zip(watched, numels, strict=True)
        self._keepers = [Keeper(p[0].name, n, alarm or Alarm()) for p, n in pairs]
        self._live: list[NodeRef] = []
        self._following = Following(found.names)
        self._decided = False
        self.untapped_nbytes = 0
        self.swaps: list[ClassSwap] = []
        found.swap(self)

    def restore(self) -> None:
        """Gives the modules their own classes back."""
        for swap in self.swaps:
            swap.restore()

    # -- forward pass ---------------------------------------------------------------------------

    def call(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward pass of a module, traced if its uses are to be captured.

        Raises:
            ValueError: it reads only the model's own input, which may not be sent.
        """
        tappable = may_be_tapped(args, kwargs)
        if torch.is_grad_enabled() and tappable and self._active(member, args, kwargs):
            return self._traced(member, args, kwargs)
        y = self.replayer.plain(member, args, kwargs)
        if self._counts(member):
            may = tappable and self._may_send(args, kwargs) and self.replayer.may_trace(member)
            sent = self.replayer.nbytes(member, args, kwargs, y) if may else UNSENDABLE
            self.untapped_nbytes += sent
        return y

    def pass_by(self) -> None:
        """Notes that the block's only module is computed elsewhere, so it cannot be captured."""
        if self._counts(0):
            self.untapped_nbytes += UNSENDABLE

    def _counts(self, member: int) -> bool:
        """True if the gradient of this call will have to be synchronised."""
        trained = any(p.parameter.requires_grad for p in self._watched[member])
        return torch.is_grad_enabled() and trained and current_task() == NO_TASK

    def _active(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if current_task() == NO_TASK:
            tappable = all(p.tappable() for p in self._watched[member])
            self._decided = tappable and self._sink.taps_block(self.block)
        if not (self._decided and self._own[member].are_there()):
            return False
        allowed = self._may_send(args, kwargs)
        if not allowed and self._explicit:
            raise ValueError(
                f"block {self._names[member]!r} reads what enters the model, which would be sent "
                f'as it is: pass og.EDAD(inputs="raw", ...) if every site may see it, or leave the '
                f"block out of blocks="
            )
        return allowed and self.replayer.may_trace(member)

    def _may_send(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._raw_inputs or _any_requires_grad((args, kwargs))

    def _traced(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._following.entry(args)
        entry, seen = found if found else (None, None)
        if seen is not None:
            args = tuple(seen if a is entry else a for a in args)
        traced = self.replayer.trace(member, args, kwargs)
        tensors = [t.detach() for t in traced.tensors]
        grads = [t.requires_grad for t in traced.tensors]
        constants = {k: (t, t._version) for k, t in enumerate(tensors) if not grads[k]}
        leaves = [t for t in traced.outputs if t.is_floating_point()]
        if not leaves:
            return traced.rebuild(traced.outputs)
        shapes = [Shape.of(t) for t in tensors]
        outputs = [Shape.of(t) for t in leaves]
        marks = () if traced.fingerprint is None else (traced.fingerprint,)
        use = Use(member, traced.about, shapes, constants, outputs, marks)
        read = [t for t in traced.tensors if t.requires_grad]
        params = [p.parameter for p in self._watched[member]]
        tapped = BlockTap.apply(self, use, (len(leaves), len(read)), *leaves, *read, *params)
        if current_task() == NO_TASK:  # in a recomputation only the saved tensors count
            use.node = NodeRef(tapped[0].grad_fn)
            if seen is not None:
                place = next(k for k, t in enumerate(traced.tensors) if t is seen)
                self._following.link(use, seen, place)
            self._live = [*(node for node in self._live if node.lives()), use.node]
            self._following.note(use, tapped)
        new = iter(tapped)
        return traced.rebuild([next(new) if t.is_floating_point() else t for t in traced.outputs])

    def gradients(self, runs: Sequence[SentRun]) -> dict[str, Tensor]:
        """Returns the sum of the runs' gradients, by full parameter name.

        Raises:
            RefusedError: a replay failed, or its outputs differ from those of the forward pass.
        """
        try:
            return self.replayer.gradients(runs)
        except ReplayError as error:
            name, param = self._names[error.member], self._watched[error.member][0].name
            told = unrepeated(name, "this backward computed it again and", explicit=self._explicit)
            raise RefusedError(told, error.site, param) from error.__cause__

    def unrepeated(self, param: str, told: str) -> str | None:
        """Returns the error text for the module that owns this parameter, or None."""
        for name, params in zip(self._names, self._watched, strict=True):
            if any(p.name == param for p in params):
                return unrepeated(name, told, explicit=self._explicit)
        return None

    def params_of(self, use: Use) -> set[str]:
        """Full names of the parameters of the module that `use` called."""
        return {p.name for p in self._watched[use.member]}

    # -- backward pass --------------------------------------------------------------------------

    def uses(self) -> list[Use]:
        """Uses that the current backward pass reaches, in the order of the forward pass."""
        alive = [use for use in map(use_of, self._live) if use is not None]
        trains = [any(p.accumulates() for p in params) for params in self._watched]
        return [use for use in alive if use.runs() and trains[use.member]]

    def capture(self, ctx: Any, use: Use, deltas: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Takes the deltas of one use.

        Returns:
            The gradients that autograd gets for the outputs, the tensors read and the parameters.

        Raises:
            RuntimeError: under backward(create_graph=True) and autograd.grad on weights, and if a
                delta that was expected to follow from another use's delta does not.
        """
        self._check_unchanged(use)
        watched, read = self._watched[use.member], ctx.saved_tensors
        if not is_shared(ctx.born_in, watched):
            self._following.forget(use)
            return self._returned(use, read, deltas, [is_wanted(ctx.born_in, p) for p in watched])
        use.kept, use.deltas = use.tensors([t.detach() for t in read]), deltas
        self._following.check(use)
        use.memory = self._keepers[use.member].keep([*use.kept, *deltas])
        self._sink.on_use(self.block, use)
        return [*deltas, *[None] * (len(read) + len(watched))]

    def _returned(
        self, use: Use, read: Sequence[Tensor], deltas: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients that autograd itself asks for, or a graph that leads to the parameters.

        Under create_graph=True the use is replayed with the real parameters. Its inputs and
        parameters then get their gradients through that graph.
        """
        watched, keeps_graph = self._watched[use.member], torch.is_grad_enabled()
        if not (keeps_graph or any(wanted)):
            return [*deltas, *[None] * (len(read) + len(watched))]
        with torch.enable_grad():  # a view does not carry the hooks of its base
            seen = [t.view_as(t) for t in read]
            params = {p.name: p.parameter.view_as(p.parameter) for p in watched}
            outputs = self.replayer.again(SentUse(use.member, use.about, use.tensors(seen)), params)
        asked = [*[keeps_graph] * len(read), *wanted]
        inputs = [t for t, needs in zip([*seen, *params.values()], asked, strict=True) if needs]
        found = iter(vjp(outputs, inputs, deltas, create_graph=keeps_graph))
        passed = [None if keeps_graph else d for d in deltas]
        return [*passed, *(next(found) if needs else None for needs in asked)]

    def _check_unchanged(self, use: Use) -> None:
        for t, version in use.constants.values():
            if t._version != version:
                raise RuntimeError(
                    f"block {self._names[use.member]!r}: one of its inputs was changed in place "
                    f"between forward and backward: other sites could not compute it again"
                )


def _any_requires_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, Mapping):
        return any(map(_any_requires_grad, value.values()))
    return isinstance(value, list | tuple) and any(map(_any_requires_grad, value))
