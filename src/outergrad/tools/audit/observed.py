"""Steps of all sites in one process, with a tap on everything that they send."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, nan

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.core.sent import Sent, Tap, copied
from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import Stop, simulate
from outergrad.private import noise_for
from outergrad.tools.named_methods.attach import Distributed, attach_of

DELTA = 1e-5
CLIP = 1.0
LOCAL_LR = 0.01
"""Learning rate of the steps between two exchanges of `og.LocalSteps`."""


class Tapped(Tap):
    """A tap that keeps all that this site sends."""

    def __init__(self) -> None:
        self._kept: list[Sent] = []

    def sent(self, sent: Sent) -> None:
        """Keeps a copy."""
        self._kept.append(copied(sent))

    @property
    def kept(self) -> Sequence[Sent]:
        """Copies of all that was sent, in order."""
        return self._kept


@dataclass(frozen=True)
class Asked:
    """A method by name, with an ε behind `@` where it is under differential privacy.

    Attributes:
        name: As the user gave it.
        attach: How sites attach it to a model.
        epsilon: ε of one step, if the gradients are private.
    """

    name: str
    attach: Distributed
    epsilon: float | None = None

    @classmethod
    def of(cls, name: str, option: str = "--methods") -> Asked:
        """Reads a name as `dad`, `rank-dad:rank=4` or `dense@8`.

        Raises:
            RecipeError: There is no such method, or it is none of outergrad's, or ε is no number
                above 0.
        """
        method, at, epsilon = name.partition("@")
        attach = attach_of(method, option)
        if not isinstance(attach, Distributed):
            raise RecipeError(
                f"{option} {name}: outergrad does not send its messages; dense sends the same"
            )
        return cls(name, attach, _epsilon(epsilon, f"{option} {name}") if at else None)

    @property
    def steps(self) -> int:
        """Batches that go into one exchange."""
        return getattr(self.attach.method, "period", 1)

    @property
    def changed_by(self) -> float | None:
        """Factor from the mean gradient of a site's batches to a change; None for gradients."""
        local = isinstance(self.attach.method, og.LocalSteps)
        return self.steps * LOCAL_LR if local else None

    def transform(self, samples: int) -> og.Private | None:
        """Returns what makes one step of so many samples private, of all sites together."""
        if self.epsilon is None:
            return None
        return og.Private(clip=CLIP, noise=_noise(self.epsilon), batch=samples)


def _epsilon(text: str, told: str) -> float:
    try:
        epsilon = float(text)
    except ValueError:
        epsilon = nan
    if not 0 < epsilon < inf:
        raise RecipeError(f"{told}: write ε as a number above 0 behind @, as dense@8")
    return epsilon


@cache
def _noise(epsilon: float) -> float:
    """Returns the noise of one step that every sample is in; it takes seconds."""
    return noise_for(epsilon, DELTA, 1.0, 1)


Batches = Sequence[tuple[Tensor, Tensor]]
"""Inputs and labels of each step up to an exchange, of one site."""


def observed(model: nn.Module, asked: Asked, batches_S: Sequence[Batches]) -> list[list[Sent]]:
    """Runs one exchange of all sites on copies of a model; returns what each of them has sent.

    Every site steps by SGD where several steps come before an exchange. A change of the weights is
    told as the mean gradient that it stands for.

    Args:
        model: Has the weights of the step, and keeps them.
        asked: The method.
        batches_S: Of every site, as many batches as the method has steps.

    Raises:
        RecipeError: The method or its privacy does not go with the model.
    """
    asked.transform(1)  # before sites do it at the same time
    samples = sum(len(x) for batches in batches_S for x, _ in batches)
    copies = [copy.deepcopy(model).train() for _ in batches_S]

    def site(group: dist.ProcessGroup, _: Stop) -> list[Sent]:
        rank, tapped = group.rank(), Tapped()
        own = copies[rank]
        # as og.distribute has it: the first site sends its running statistics
        options = {"buffers": "broadcast", **asked.attach.options, "tap": tapped}
        if asked.epsilon is not None:
            options["transform"] = asked.transform(samples)
        replica = replace(asked.attach, options=options)(own, group)
        optimizer = torch.optim.SGD(own.parameters(), lr=LOCAL_LR)
        for x, y in batches_S[rank]:
            optimizer.zero_grad()
            cross_entropy(own(x), y).backward()
            optimizer.step()
        replica.close()
        return list(tapped.kept)

    found = simulate(site, len(batches_S))
    return [
        [replace(one, scale=one.scale / (asked.changed_by or 1.0)) for one in sent]
        for sent in found
    ]
