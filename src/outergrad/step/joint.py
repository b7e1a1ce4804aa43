"""Joint backpropagation: below a shared part, the mean delta of all sites flows back.

Where a part that is each site's own (`og.Local`) hands its output y to a shared part, every site s
has a delta of its own there, delta_s. With `joint=True` all sites go on with the mean, (1 / S)
sum_s delta_s, row by row: their own parts are trained as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from outergrad.capture.class_swap import ClassSwap
from outergrad.capture.engine import will_run
from outergrad.capture.tap import DeltaTap
from outergrad.capture.untappable import is_transformed
from outergrad.comm.agree import fingerprint
from outergrad.core.sent import Kind, Sent, Way
from outergrad.core.structure import flattened, rebuilt
from outergrad.core.transport import Comm
from outergrad.messages.checksum import combined
from outergrad.messages.header import Header
from outergrad.messages.wire import DELTAS, Preamble, State, read_all
from outergrad.step import param_grad

_START = Preamble.nbytes(0, 0)
_LANE = 1
"""Lane apart from the step's messages: a failed site cannot know which came between."""


class Point(NamedTuple):
    """A place in the graph of a forward where deltas are averaged."""

    node: ref[Any]
    shape: torch.Size
    dtype: torch.dtype


class JointParts:
    """Parts of a model whose outputs' deltas are averaged.

    Args:
        parts: modules that are each site's own, by full name.
        on_delta: is given a point and this site's delta, and returns the mean.

    Attributes:
        params: parameters of the parts.
    """

    def __init__(
        self, parts: dict[str, nn.Module], on_delta: Callable[[Point, Tensor], Tensor]
    ) -> None:
        self._on_delta, self._points = on_delta, list[Point]()
        self.params = [p for module in parts.values() for p in module.parameters()]
        self._swaps = [self._joined(name, module) for name, module in parts.items()]

    def remove(self) -> None:
        """Restores the modules' own classes."""
        for swap in self._swaps:
            swap.restore()

    def points(self) -> list[Point]:
        """Returns the points that the current backward reaches, in the order of forward."""
        return [point for point in self._points if will_run(point.node())]

    def points_in(self, nodes: Collection[Node]) -> list[Point]:
        """Returns the points at some of these nodes, in the order of forward."""
        return [point for point in self._points if point.node() in nodes]

    def _joined(self, name: str, module: nn.Module) -> ClassSwap:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = swap.plain_forward(*args, **kwargs)
            if torch.is_grad_enabled() and is_transformed():
                raise RuntimeError(
                    f"joint=True: {name!r} runs inside a transform of torch.func or in "
                    f"forward-mode AD, where its deltas cannot be averaged over the sites: call it "
                    f"outside, or use joint=False"
                )
            try:
                structure, tensors = flattened(output)
            except TypeError as error:
                raise TypeError(f"joint=True: what {name!r} returned: {error}") from None
            return rebuilt(structure, [self._tapped(t) for t in tensors])

        swap = ClassSwap(module, forward)
        return swap

    def _tapped(self, y: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and y.requires_grad):
            return y
        tapped: Tensor = DeltaTap.apply(y, self._replaced)  # type: ignore[assignment]
        point = Point(ref(tapped.grad_fn), tapped.shape, tapped.dtype)
        self._points = [*(p for p in self._points if p.node() is not None), point]
        return tapped

    def _replaced(self, node: Any, delta: Tensor) -> Tensor:
        point = next(point for point in self._points if point.node() is node)
        return self._on_delta(point, delta)


def described(points: Sequence[Point]) -> tuple[int, int]:
    """Returns the number of points and a fingerprint of their shapes, equal on all sites."""
    return len(points), fingerprint([f"{tuple(p.shape)} {p.dtype}" for p in points])


class JointStep:
    """Averages of the deltas in one backward.

    Args:
        points: points that this backward reaches.
        comm: the transport.
        header: this site's header of the step; needed if there are points.
        params: parameters whose gradients depend on the averages.
    """

    def __init__(
        self,
        points: Sequence[Point],
        comm: Comm,
        header: Header | None = None,
        params: Sequence[nn.Parameter] = (),
    ) -> None:
        self._waiting, self._comm = list(points), comm
        self._header, self._params = header, params
        self._digests: list[int] = []
        self.averages = bool(points)
        """True if there is anything to average."""

    @property
    def digest(self) -> int:
        """Digest of all messages so far; if it differs, a site sent different ones."""
        return combined(self._digests)

    def clear(self) -> None:
        """Drops gradients that depend on the averages: the step does not count."""
        param_grad.drop(self._params)

    def check(self, joints: Sequence[tuple[int, int]]) -> None:
        """Checks that all sites average the same deltas; otherwise none are averaged.

        Raises:
            RuntimeError: on all sites, if they do not.
        """
        odd = next((rank for rank, joint in enumerate(joints) if joint != joints[0]), None)
        if odd is not None:
            sites = self._comm.sites
            self._waiting.clear()
            raise RuntimeError(
                f"joint=True: the parts that each site keeps to itself returned other shapes on "
                f"{sites[odd].called} than on {sites[0].called}: use the same batch size and "
                f"output width on all sites"
            )

    def mean(self, point: Point, delta: Tensor) -> Tensor:
        """Returns the mean delta; this site's own if a site has failed: the step is void.

        Raises:
            RefusedError: a message is not as it was sent; the step is to be voted down.
        """
        self._waiting.remove(point)
        messages, expected = self._exchange(point, delta, State.GOOD)
        preambles, state = read_all(messages, expected)
        self._digests.append(combined(preamble.total for preamble in preambles))
        if state != State.GOOD:
            return delta
        parts = [m[_START:].view(delta.dtype).view(delta.shape) for m in messages]
        return sum(parts[1:], parts[0]) / len(parts)

    def give_up(self) -> None:
        """Tells the others, at each point that is left, that this site has failed.

        The order is that in which backward would have reached the points, last made first: the
        others wait there for messages of these lengths.
        """
        while self._waiting:
            self._exchange(self._waiting.pop(), None, State.FAILED)

    def _exchange(
        self, point: Point, delta: Tensor | None, state: State
    ) -> tuple[list[Tensor], Preamble]:
        """Returns the messages of all sites, and the preamble that is expected in them."""
        assert self._header is not None
        nbytes = _START + point.shape.numel() * point.dtype.itemsize
        message = torch.zeros(nbytes, dtype=torch.uint8, device=self._comm.device)
        if delta is not None:
            message[_START:].view(point.dtype).copy_(delta.reshape(-1))
        own, place = self._header, DELTAS + len(self._waiting)
        preamble = Preamble(own.fingerprint, own.step, place, own.rank, state, ())
        preamble.write(message)
        sizes = [nbytes] * self._comm.world_size
        if self._comm.tap is not None and delta is not None:
            about = {"way": Way.GATHERED, "step": own.step, "kind": Kind.DELTAS}
            self._comm.tap.sent(Sent(name=f"joint {len(self._waiting)}", content=delta, **about))
        return self._comm.all_gather(message, sizes, lane=_LANE).wait(), preamble


def joint_parts(model: nn.Module, local: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the largest all-local modules that have shared parameters registered behind them.

    Raises:
        ValueError: there are none.
    """
    order = [name for name, _ in model.named_parameters()]
    last_shared = max(i for i, name in enumerate(order) if name not in local)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = [n for n, _ in module.named_parameters(prefix=name)]
        within = any(name.startswith(f"{other}.") for other in found)
        whole = inside and not within and set(inside) <= set(local)
        if whole and order.index(inside[0]) < last_shared:
            found[name] = module
    if not found:
        raise ValueError(
            "PerLayer: joint=True; no module that is all og.Local() comes before a shared one"
        )
    return found
