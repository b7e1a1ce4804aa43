"""Runs programs: on real sites, and as the float64 reference that they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from fuzz.nodes import VOCABULARY, Graph, Net, Pick
from fuzz.programs import Pass, Program, Step
from torch import Tensor, nn

import outergrad as og

Gradients = dict[str, Tensor | None]
"""By name, with the number of the model before."""


def batch_of(graph: Graph, key: tuple[int, ...], rows: int, data: str) -> Tensor:
    """What enters a graph: in float64, but exact in every dtype that it may be cast to."""
    seed = 0
    for k in key:
        seed = (seed * 1009 + k + 1) % 2**31
    generator = torch.Generator().manual_seed(seed)
    kind, *sizes = graph.start
    if kind == "ids":
        x = torch.randint(0, VOCABULARY, (rows, *sizes), generator=generator)
    else:
        x = torch.randn(rows, *sizes, generator=generator).bfloat16().double()
    if data == "zeros":
        return torch.zeros_like(x)
    return x[:1].expand_as(x).contiguous() if data == "one row" and rows else x


class Site:
    """Copies of the models of a program, and the losses of one site.

    Args:
        program: what it plays.
        rank: of the site.
        nets: the models.
        double: whether to compute in float64.
        alike: whether all sites have the same batches.
        calm: whether no backward raises.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        nets: Sequence[Net],
        *,
        double: bool,
        alike: bool,
        calm: bool = True,
    ) -> None:
        self.program, self.rank, self.nets = program, rank, nets
        self._double, self._alike, self._calm = double, alike, calm
        self._kept: list[Any] = []
        self.named = {
            f"{k}.{name}": p for k, net in enumerate(nets) for name, p in net.named_parameters()
        }

    def loss(self, part: Pass, step: int, k: int) -> Tensor:
        """The forward of a pass, and what runs beside it."""
        losses = [self._loss_of(i, part, step, k) for i in part.nets]
        if part.beside:
            with torch.no_grad() if part.beside == "no_grad" else nullcontext():
                self._kept = [self._loss_of(i, part, step, k + 100) for i in part.nets]
        return sum(losses[1:], losses[0])

    def _loss_of(self, i: int, part: Pass, step: int, k: int) -> Tensor:
        graph, rank = self.program.nets[i], self.rank
        x = batch_of(graph, (i, step, k, 0 if self._alike else rank), part.rows[rank], part.data)
        if x.is_floating_point():
            x = x.to(torch.float64 if self._double or graph.dtype == "float64" else torch.float32)
        boom = part.boom[rank] and not self._calm
        pick = Pick(part.on[rank], part.early[rank] and graph.early is not None, boom)
        with self._context(graph):
            return self.nets[i](x, pick)

    def _context(self, graph: Graph) -> Any:
        if graph.dtype != "autocast" or self._double:
            return nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def backward(self, loss: Tensor, part: Pass, *, retain: bool) -> None:
        """To all parameters, or to some."""
        inputs = [p for p in self._of(part) if p.requires_grad] if part.some else None
        if inputs is not None:
            inputs = inputs[:: part.some]
        loss.backward(retain_graph=retain, inputs=inputs or None)

    def _of(self, part: Pass) -> Iterator[nn.Parameter]:
        for i in part.nets:
            yield from self.nets[i].parameters()

    def shrink(self) -> None:
        """Other weights."""
        with torch.no_grad():
            for p in self.named.values():
                p.mul_(0.75)


def events(part: Pass) -> list[tuple[bool, bool]]:
    """The backwards of a pass: whether the graph is kept, and whether the sites share."""
    if part.twice:
        return [(True, part.sync and part.twice == "shared"), (False, part.sync)]
    return [(False, part.sync)]


class Expected:
    """What a program leaves in the gradients, by plain PyTorch and explicit sums.

    Args:
        program: what is played.
        double: in float64, or in the dtypes of the program.
        nudge: by how much weights are changed, relatively, to see what rounding does.
        alike: whether all sites have the same batches.
    """

    def __init__(
        self, program: Program, *, double: bool, nudge: float = 0.0, alike: bool = False
    ) -> None:
        self.program = program
        nets = [graph.build() for graph in program.nets]
        if double:
            nets = [net.double() for net in nets]
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in (p for net in nets for p in net.parameters()):
                p.mul_(1 + nudge * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        copies = [[copy.deepcopy(net) for net in nets] for _ in range(program.sites)]
        own = {"double": double, "alike": alike}
        self.sites = [Site(program, rank, copies[rank], **own) for rank in range(program.sites)]
        self.grads: list[Gradients] = [dict.fromkeys(s.named) for s in self.sites]
        self.size = dict.fromkeys(self.sites[0].named, 0.0)
        self._kept: list[Gradients] = [dict.fromkeys(s.named) for s in self.sites]
        self._passes = [0] * len(nets)

    def play(self) -> Iterator[tuple[list[Gradients], dict[str, float]]]:
        """After each step, every site's gradients, and the sum of the norms of what went in."""
        for number, step in enumerate(self.program.steps):
            self._zero(step)
            self._run(step, number)
            yield [dict(grads) for grads in self.grads], dict(self.size)
            if step.shrink:
                for site in self.sites:
                    site.shrink()
            if any(any(part.boom) for part in step.passes):
                self._zero(Step((), "none"))

    def _zero(self, step: Step) -> None:
        for grads in self.grads if step.zero != "kept" else ():
            for name, grad in grads.items():
                if step.zero == "none" or grad is None:
                    grads[name] = None
                else:
                    grads[name] = torch.zeros_like(grad)
        if step.zero != "kept" and self.program.cadence == 1:
            self.size = dict.fromkeys(self.size, 0.0)

    def _run(self, step: Step, number: int) -> None:
        losses: dict[tuple[int, int], Tensor] = {}
        for k in range(len(step.passes)) if step.forwards_first else ():
            self._forward(step, number, k, losses)
        for k, part in enumerate(step.passes):
            if not step.forwards_first:
                self._forward(step, number, k, losses)
            for retain, sync in events(part):
                for rank, site in enumerate(self.sites):
                    self._backward(site, losses[rank, k], part, retain=retain)
                    self._check_reached(site, part)
                if sync:
                    self._share(part.nets)

    def _forward(
        self, step: Step, number: int, k: int, losses: dict[tuple[int, int], Tensor]
    ) -> None:
        for rank, site in enumerate(self.sites):
            losses[rank, k] = site.loss(step.passes[k], number, k)

    def _backward(self, site: Site, loss: Tensor, part: Pass, *, retain: bool) -> None:
        for p in site.named.values():
            p.grad = None
        site.backward(loss, part, retain=retain)
        grads = self.grads[site.rank]
        for name, p in site.named.items():
            if p.grad is not None:
                before = grads[name]
                grads[name] = p.grad if before is None else before + p.grad
                self.size[name] += p.grad.double().norm().item()

    def _check_reached(self, site: Site, part: Pass) -> None:
        """A backward that reaches nothing shared of a model is none for the other sites."""
        reached = {n for n, p in site.named.items() if p.grad is not None}
        shared = {n for n in reached if _every_of(self.program, n)}
        if {int(name.partition(".")[0]) for name in shared} != set(part.nets):
            raise RuntimeError("backward reaches nothing that is shared")

    def _share(self, nets: Sequence[int]) -> None:
        for i in sorted(set(nets)):
            self._passes[i] += 1
            for name in self.size:
                every = _every_of(self.program, name)
                if name.startswith(f"{i}.") and every:
                    self._share_one(name, every, due=self._passes[i] % every == 0)

    def _share_one(self, name: str, every: int, *, due: bool) -> None:
        for grads, kept in zip(self.grads, self._kept, strict=True):
            kept[name] = _added(kept[name], grads[name])
            grads[name] = None
        if due:
            found = [kept[name] for kept in self._kept if kept[name] is not None]
            mean = sum(found[1:], found[0]) / len(self.grads) / every if found else None
            for grads, kept in zip(self.grads, self._kept, strict=True):
                grads[name], kept[name] = mean, None


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _every_of(program: Program, name: str) -> int:
    """At every how many-th pass a parameter travels; 0 for never."""
    i, _, own = name.partition(".")
    method = program.methods[int(i)]
    if isinstance(method, og.PerLayer):
        method = method.method_of(own)
    return 0 if isinstance(method, og.Local) else getattr(method, "every", 1)


class Refused(Exception):  # noqa: N818  # it is no error
    """The model and the method do not fit, as all sites say in the same words."""


class Real:
    """A site of a real session.

    Args:
        program: what it plays.
        rank: of the site.
        nets: the models, not yet distributed.
        distribute: makes a session of a model and a method.
        alike: whether all sites have the same batches.

    Attributes:
        void: whether a backward of the last step raised, as it was to.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        nets: Sequence[Net],
        distribute: Callable[[Net, Any], og.Session],
        *,
        alike: bool = False,
    ) -> None:
        self.program = program
        nets = [copy.deepcopy(net) for net in nets]
        self.sessions: list[og.Session] = []
        try:
            for net, method in zip(nets, program.methods, strict=True):
                self.sessions.append(distribute(net, method))
        except ValueError as error:
            self.detach()
            raise Refused(str(error)) from None
        self.site = Site(program, rank, nets, double=False, alike=alike, calm=False)

    def play(self) -> Iterator[tuple[Gradients, list[og.Session]]]:
        """After each step, the gradients."""
        for number, step in enumerate(self.program.steps):
            self._zero(step.zero)
            self.void = False
            self._run(step, number)
            grads = {name: p.grad for name, p in self.site.named.items()}
            yield {n: None if g is None else g.clone() for n, g in grads.items()}, self.sessions
            if step.shrink:
                self.site.shrink()
            if any(any(part.boom) for part in step.passes):
                self._zero("none")

    def detach(self) -> None:
        """Ends the sessions."""
        for session in self.sessions:
            session.detach()

    def _zero(self, zero: str) -> None:
        for net in self.site.nets if zero != "kept" else ():
            net.zero_grad(set_to_none=zero == "none")

    def _run(self, step: Step, number: int) -> None:
        site = self.site
        first = enumerate(step.passes) if step.forwards_first else ()
        losses = [site.loss(part, number, k) for k, part in first]
        for k, part in enumerate(step.passes):
            loss = losses[k] if losses else site.loss(part, number, k)
            for retain, sync in events(part):
                with ExitStack() as stack:
                    for session in () if sync else self.sessions:
                        stack.enter_context(session.no_sync())
                    self._backward(loss, part, retain=retain)

    def _backward(self, loss: Tensor, part: Pass, *, retain: bool) -> None:
        try:
            self.site.backward(loss, part, retain=retain)
        except (og.StepDiscardedError, ArithmeticError):
            if not any(part.boom):
                raise
            self.void = True
