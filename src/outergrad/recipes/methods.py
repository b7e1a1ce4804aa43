"""The ways to make gradients global that can be compared."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import outergrad as og
from outergrad._protocols import Method, Recorder
from outergrad.recipes.errors import RecipeError
from outergrad.recipes.first_rows import FirstRows

FIRST_COMPRESSED_STEP = 2
"""PowerSGD all-reduces whole gradients before: DDP still reorders its bucket until then."""

ONE_BUCKET_MB = 1000
"""Larger than any model here."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """This site's copy of the model.

    Attributes:
        model: What to call and to train.
        session: Its session, where outergrad exchanges the gradients.
        start_bytes: What the session had sent before the first step.
        planned_bytes: Gradient bytes per step where there is no session, if known beforehand.
    """

    model: nn.Module
    session: og.Session | None = None
    start_bytes: int = 0
    planned_bytes: int | None = None

    @property
    def sent_bytes(self) -> int | None:
        """Gradient bytes that this site sends per step, on average; None if nobody counts them."""
        if not self.session:
            return self.planned_bytes
        stats = self.session.stats()
        return round((stats.total_sent_bytes - self.start_bytes) / max(stats.step, 1))

    def total_sent_bytes(self, steps: int) -> int | None:
        """Gradient bytes that this site has sent in so many steps; None if nobody counts them."""
        if self.session:
            return self.session.stats().total_sent_bytes - self.start_bytes
        return None if self.planned_bytes is None else steps * self.planned_bytes

    def close(self) -> None:
        """Leaves a plain model."""
        if self.session:
            self.session.detach()


Attach = Callable[[nn.Module, dist.ProcessGroup | None], Replica]


def all_reduce_bytes(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Bytes that a site sends to all-reduce every gradient in a ring; DDP's buffers come on top."""
    sites = dist.get_world_size() if group is None else group.size()
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return round(2 * (sites - 1) / sites * size)


def _plain(model: nn.Module, _group: dist.ProcessGroup | None) -> Replica:
    return Replica(model=model, planned_bytes=0)


def _ddp(model: nn.Module, group: dist.ProcessGroup | None) -> Replica:
    wrapped = DistributedDataParallel(model, process_group=group)
    return Replica(model=wrapped, planned_bytes=all_reduce_bytes(model, group))


def _ddp_fp16(model: nn.Module, group: dist.ProcessGroup | None) -> Replica:
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(group, fp16_compress_hook)
    return Replica(model=wrapped, planned_bytes=all_reduce_bytes(model, group) // 2)


def _powersgd(rank: int) -> Attach:
    def attach(model: nn.Module, group: dist.ProcessGroup | None) -> Replica:
        # The hook chains collectives per bucket: those of two buckets start in an order that
        # timing decides, and where sites differ in it, gloo ends the process. A cap that the
        # whole model is below leaves one bucket, in the first step and after DDP rebuilds it.
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=ONE_BUCKET_MB)
        state = PowerSGDState(
            process_group=group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=FIRST_COMPRESSED_STEP,
        )
        wrapped.register_comm_hook(state, powerSGD_hook)
        return Replica(model=wrapped)

    return attach


@dataclass(frozen=True)
class Distributed:
    """An `Attach` of outergrad's own.

    Attributes:
        method: How gradients travel.
        recorder: What is told of every step.
    """

    method: Method | og.PerLayer
    recorder: Recorder | None = None

    def __call__(self, model: nn.Module, group: dist.ProcessGroup | None) -> Replica:
        """Distributes the model.

        Raises:
            RecipeError: The method does not fit the model; at every site.
        """
        try:
            session = og.distribute(model, self.method, group=group, recorder=self.recorder)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        return Replica(model=model, session=session, start_bytes=session.stats().total_sent_bytes)

    def beside(self, local: Sequence[str], *, joint: bool) -> "Distributed":
        """The same, with parts that each site keeps to itself."""
        assert not isinstance(self.method, og.PerLayer)
        methods = dict.fromkeys(local, og.Local())
        return Distributed(og.PerLayer({**methods, "*": self.method}, joint=joint))


def _edad(blocks: str = "", **settings: Any) -> og.EDAD:
    """Reads ``blocks=encoder.*+decoder.*``."""
    return og.EDAD(blocks=blocks.split("+") if blocks else (), **settings)


METHODS: dict[str, Attach] = {
    "pooled": _plain,
    "alone": _plain,
    "ddp": _ddp,
    "ddp-fp16": _ddp_fp16,
    "powersgd-1": _powersgd(rank=1),
    "powersgd-2": _powersgd(rank=2),
    "powersgd-4": _powersgd(rank=4),
    "powersgd-8": _powersgd(rank=8),
    "dense": Distributed(og.Dense()),
    "dad": Distributed(og.DAD()),
    "dad-activations": Distributed(og.DAD(reveal="activations")),
    "edad": Distributed(og.EDAD()),
    "edad-raw": Distributed(og.EDAD(inputs="raw")),
    "rank-dad-1": Distributed(og.RankDAD(rank=1)),
    "rank-dad-2": Distributed(og.RankDAD(rank=2)),
    "rank-dad-4": Distributed(og.RankDAD(rank=4)),
    "rank-dad-8": Distributed(og.RankDAD(rank=8)),
}
"""What makes a model ready, in place; each takes the model and its process group.

No group means the default one. Every site of the group must call it at the same point.
"""

CONFIGURABLE: dict[str, Callable[..., Method]] = {
    "dad": og.DAD,
    "edad": _edad,
    "rank-dad": og.RankDAD,
    "og-powersgd": og.PowerSGD,
    "first-rows": FirstRows,
}
"""Methods that can be named with settings, as ``rank-dad:rank=16:wire=topk0.1+int8``."""

_CODECS: dict[str, og.wire.Codec] = {"bf16": og.wire.BF16(), "int8": og.wire.Int8()}


def attach_of(
    name: str, option: str = "--method", local: Sequence[str] = (), *, joint: bool = False
) -> Attach:
    """What makes a model ready by a method.

    Args:
        name: A key of `METHODS`, or one of `CONFIGURABLE` with settings.
        option: Where it was named, for the error.
        local: Patterns of parameters that each site keeps to itself.
        joint: Whether the mean delta of all sites flows back into these.

    Raises:
        RecipeError: There is no such method or setting, or it cannot leave out parameters.
    """
    attach = _attach_of(name, option)
    if not local and not joint:
        return attach
    if not isinstance(attach, Distributed):
        raise RecipeError(
            f"--local and --joint do not go with {option} {name}: use dad, or another"
        )
    try:
        return attach.beside(local, joint=joint)
    except ValueError as error:
        raise RecipeError(f"--local: {error}") from error


def _attach_of(name: str, option: str) -> Attach:
    if name in METHODS:
        return METHODS[name]
    kind, *settings = name.split(":")
    if kind not in CONFIGURABLE:
        raise RecipeError(
            f"{option} must be one of {', '.join(METHODS)}, or {' or '.join(CONFIGURABLE)} with "
            f"settings, as rank-dad:rank=16, not {name!r}"
        )
    try:
        return Distributed(CONFIGURABLE[kind](**dict(map(_setting, settings))))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{option} {name}: {error}") from error


def _setting(text: str) -> tuple[str, Any]:
    """Reads ``rank=16`` and ``wire=int8``; what is no Python number or the like is a word."""
    name, _, value = text.partition("=")
    if name == "wire":
        return name, _codecs(value)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _codecs(text: str) -> tuple[og.wire.Codec, ...]:
    """Reads ``topk0.1+int8``; ``fp32`` is none."""
    return () if text == "fp32" else tuple(map(_codec, text.split("+")))


def _codec(text: str) -> og.wire.Codec:
    """Reads ``int8`` or, with the fraction behind the name, ``topk0.1``.

    Raises:
        ValueError: There is no such codec.
    """
    if text in _CODECS:
        return _CODECS[text]
    picking = re.fullmatch(r"topk([\d.e-]+)", text)
    if picking is None:
        known = f"{', '.join(_CODECS)}, topk with a fraction, as topk0.1, or topk0.1+int8"
        raise ValueError(f"wire={text}; use {known}")
    return og.wire.TopK(float(picking[1]))
