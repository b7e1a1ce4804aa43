"""Base of all peers: they hook into the optimizer, and exchange when it steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from outergrad.capture.optimizer_steps import ignore, listen
from outergrad.comm.cost import RingCost


class Sites:
    """Sites of a process group.

    Args:
        group: The process group; the default group if None.

    Attributes:
        sent_bytes: Payload bytes that this site has sent so far, as gloo sends them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._cost = RingCost(dist.get_world_size() if group is None else group.size())
        self.sent_bytes = 0

    @property
    def number(self) -> int:
        """Number of sites."""
        return self._cost.sites

    @property
    def rank(self) -> int:
        """Number of this site, from 0."""
        return dist.get_rank() if self._group is None else self._group.rank()

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Averages tensors over the sites by one all-reduce; shapes are the same everywhere."""
        if not tensors:
            return []
        total = self._sum(tensors)
        self.sent_bytes += self._cost.all_reduce(total.nbytes).sent
        return split_like(total / self.number, tensors)

    def gather(self, content: Tensor) -> list[Tensor]:
        """Returns every site's tensor, by one all-gather; shapes are the same everywhere."""
        found = [torch.empty_like(content) for _ in range(self.number)]
        dist.all_gather(found, content, group=self._group)
        self.sent_bytes += self._cost.all_gather(content.nbytes, 0).sent
        return found

    def exchange(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Sends each site its piece, in the order of ranks; returns those that are for this one.

        Pieces are vectors, of a length that all sites know, the same from everyone.
        """
        own, sizes = pieces[self.rank], [len(piece) for piece in pieces]
        found = own.new_empty(len(own) * self.number)
        here = [len(own)] * self.number
        dist.all_to_all_single(found, torch.cat([*pieces]), here, sizes, group=self._group)
        self.sent_bytes += sum(piece.nbytes for piece in pieces) - own.nbytes
        return [*found.split(here)]

    @torch.no_grad()
    def make_equal(self, tensors: Iterable[Tensor]) -> None:
        """Copies site 0's values to all sites, uncounted, since it is before the first step."""
        own = list(tensors)
        total = self._sum([x if self.rank == 0 else torch.zeros_like(x) for x in own])
        for x, of_first in zip(own, split_like(total, own), strict=True):
            x.copy_(of_first)

    def _sum(self, tensors: Sequence[Tensor]) -> Tensor:
        total = torch.cat([x.detach().reshape(-1) for x in tensors])
        dist.all_reduce(total, group=self._group)
        return total


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Splits a vector into consecutive parts with the shapes of tensors."""
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


class OptimizerPeer:
    """Exchanges before and after the steps of the optimizer that trains a model.

    Every site begins with the weights of site 0, and must step the same number of times. Buffers
    such as running statistics stay local to each site.

    Args:
        model: Model that is trained.
        group: Process group of the sites; the default group if None.

    Attributes:
        params: Trained parameters by name, each once.
        sites: The sites.
        memory: State of this site between exchanges, by kind, then by parameter name.
        left_of_rate: Share of the loop's first learning rate that its schedule has left; 1 without
            a schedule of PyTorch. A rate of the peer's own falls by it, too.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.sites = Sites(group)
        self.memory: dict[str, dict[str, Tensor]] = {}
        self.left_of_rate = 1.0
        self._steps = 0
        self.sites.make_equal(self.params.values())
        listen(self)

    # -- what a peer overrides -------------------------------------------------------------------

    def share_gradients(self, lr: float) -> None:
        """Makes gradients global, before the optimizer steps.

        A peer that moves a weight itself sets its gradient to None, so that the optimizer skips it.

        Args:
            lr: The learning rate of the optimizer.
        """

    def share_weights(self) -> None:
        """Exchanges after the optimizer has stepped."""

    def flush(self) -> None:
        """Shares what the last local steps changed; every site must call it."""

    # -- what the training loop calls ------------------------------------------------------------

    @property
    def sent_bytes(self) -> int:
        """Bytes that this site has sent so far."""
        return self.sites.sent_bytes

    @property
    def steps(self) -> int:
        """Steps of the optimizer so far."""
        return self._steps

    def detach(self) -> None:
        """Ends the exchanges."""
        ignore(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns step, bytes and memory of this site."""
        memory = {k: {n: x.clone() for n, x in own.items()} for k, own in self.memory.items()}
        counted = {"steps": self._steps, "sent_bytes": self.sites.sent_bytes}
        return {"sites": self.sites.number, **counted, "memory": memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the saved state.

        Raises:
            ValueError: It was saved among another number of sites.
        """
        if state["sites"] != self.sites.number:
            raise ValueError(
                f"what each of {state['sites']} sites remembers does not fit "
                f"{self.sites.number}: start as many, or begin anew"
            )
        for kind, own in self.memory.items():
            for name, x in own.items():
                x.copy_(state["memory"][kind][name])
        self._steps, self.sites.sent_bytes = state["steps"], state["sent_bytes"]

    # -- what optimizers call --------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Called when an optimizer is about to step: shares gradients."""
        if self._holds(optimizer):
            group = optimizer.param_groups[0]
            first = group.get("initial_lr")
            self.left_of_rate = group["lr"] / first if first else 1.0
            self.share_gradients(group["lr"])

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Called when an optimizer has stepped: counts the step and shares weights."""
        if self._holds(optimizer):
            self._steps += 1
            self.share_weights()

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Shares nothing: the lab trains without a `GradScaler`."""

    def _holds(self, optimizer: Optimizer) -> bool:
        """True if an optimizer trains the whole model.

        Raises:
            RuntimeError: It trains a part of the model.
        """
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left = [name for name, p in self.params.items() if id(p) not in held]
        if left and len(left) < len(self.params):
            raise RuntimeError(
                f"{type(self).__name__} needs one optimizer for the whole model, and this one "
                f"lacks {left[0]!r}: give it all parameters that are trained"
            )
        return not left

    # -- help for peers --------------------------------------------------------------------------

    def remember(self, kind: str) -> dict[str, Tensor]:
        """Creates a memory of zeros in the shape of every parameter."""
        zeros = {name: torch.zeros_like(p).detach() for name, p in self.params.items()}
        return self.memory.setdefault(kind, zeros)

    def gradient(self, name: str) -> Tensor:
        """Returns a parameter's gradient; zeros where this site's backward had none."""
        p = self.params[name]
        return torch.zeros_like(p) if p.grad is None else p.grad
