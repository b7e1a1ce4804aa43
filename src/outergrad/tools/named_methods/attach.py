"""Named methods of synchronising gradients: outergrad's own, and DDP's for comparison."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, signature
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import outergrad as og
from outergrad.core.protocols import Method, Recorder
from outergrad.core.types import Factors, Part, Slot
from outergrad.launch.errors import RecipeError
from outergrad.linalg.outer import row_sum
from outergrad.methods.dad import DAD, DADCompressor
from outergrad.methods.local_steps import Outer


class Peer(Protocol):
    """Third-party method, which synchronises by itself whenever an optimizer steps."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this site has sent in all exchanges so far."""
        ...

    @property
    def steps(self) -> int:
        """Number of optimizer steps so far."""
        ...

    def flush(self) -> None:
        """Shares the changes of the last local steps; every site must call it."""
        ...

    def detach(self) -> None:
        """Ends the exchanges."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns this site's checkpoint state, in addition to the model and the optimizer."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state.

        Raises:
            ValueError: It is that of another number of sites, or of another model.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Replica:
    """This site's copy of the model.

    Attributes:
        model: Model to call and to train.
        session: Its session, where outergrad synchronises the gradients.
        peer: Third-party method that synchronises, where neither outergrad nor PyTorch does.
        start_bytes: Bytes that the session had sent before the first step.
        period: Steps from one of the session's exchanges to the next.
        planned_bytes: Gradient bytes per step where there is neither session nor peer, if known.
        weighted: True if the session weights a site by its samples, so that no loss need do so.
        whole: True if the last exchange brings all that sites owe.
    """

    model: nn.Module
    session: og.Session | None = None
    peer: Peer | None = None
    start_bytes: int = 0
    period: int = 1
    planned_bytes: int | None = None
    weighted: bool = False
    whole: bool = False

    @property
    def sent_bytes(self) -> int | None:
        """Gradient bytes that this site sends per step, on average; None if nothing counts them."""
        if self.peer:
            return round(self.peer.sent_bytes / max(self.peer.steps, 1))
        if not self.session:
            return self.planned_bytes
        stats = self.session.stats()
        steps = self.period * max(stats.step, 1)
        return round((stats.total_sent_bytes - self.start_bytes) / steps)

    def total_sent_bytes(self, steps: int) -> int | None:
        """Gradient bytes that this site has sent in `steps` steps; None if nothing counts them."""
        if self.peer:
            return self.peer.sent_bytes
        if self.session:
            return self.session.stats().total_sent_bytes - self.start_bytes
        return None if self.planned_bytes is None else steps * self.planned_bytes

    def finish(self) -> None:
        """Shares the last local steps' changes; every site must call it after its last step."""
        if self.session:
            self.session.flush(whole=self.whole)
        if self.peer:
            self.peer.flush()

    def close(self) -> None:
        """Detaches the session and the peer, which leaves a plain model."""
        if self.session:
            self.session.detach()
        if self.peer:
            self.peer.detach()


_CODECS: dict[str, og.wire.Codec] = {
    "bf16": og.wire.BF16(),
    "int8": og.wire.Int8(),
    "int4": og.wire.Int4(),
    "int3": og.wire.Int3(),
    "int2": og.wire.Int2(),
    "sign": og.wire.Sign(),
}
_OF_CODECS = ("wire", "vectors")
"""Settings whose values are codecs."""


def read_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Parses texts like ``rank=16`` and ``wire=topk0.1+int8`` into arguments by name.

    Raises:
        ValueError: There is no such codec, or a setting occurs twice.
    """
    found: dict[str, Any] = {}
    for name, value in map(_setting, texts):
        if name in found:
            raise ValueError(f"{name}= is there twice")
        found[name] = value
    return found


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Returns a suggestion for the closest known name; empty if none is close."""
    close = get_close_matches(name.lower(), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _setting(text: str) -> tuple[str, Any]:
    """Name and value; ``wire=fp32`` means no codec, and a value that is no literal is a string."""
    name, _, value = text.partition("=")
    if name in _OF_CODECS:
        return name, () if value == "fp32" else tuple(map(_codec, value.split("+")))
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _codec(text: str) -> og.wire.Codec:
    """Codec of a name like ``int8``, or ``topk0.1`` with its fraction.

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


@dataclass(frozen=True, kw_only=True)
class FirstRows:
    """Sites send the raw factors of the first rows of their batches, and bias gradients whole.

    Attributes:
        rank: R, the number of rows.
        every: k: share at every k-th synchronised backward pass.
    """

    rank: int = 8
    every: int = 1

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"FirstRows(rank={self.rank}): use 1 or more")

    def compressor(self) -> FirstRowsCompressor:
        """Returns a new compressor with these settings."""
        return FirstRowsCompressor(self.rank)


class FirstRowsCompressor(DADCompressor):
    """Drops all rows but the first R."""

    exact = False

    def __init__(self, rank: int) -> None:
        super().__init__(DAD(always=True, reveal="activations"))
        self._rank = rank

    def sent_rows(self, slot: Slot, rows: int, site: int = 0) -> int:
        """Returns R, or the number of rows if there are fewer."""
        return min(rows, self._rank)

    def sends_bias(self, slot: Slot) -> bool:
        """True if the slot has a bias, whose gradient includes the rows that are dropped."""
        return slot.bias is not None

    def compress(self, parts: Sequence[Part]) -> list[Factors]:
        """Returns the factors of each part's first rows."""
        return [self._first(part) for part in parts]

    def _first(self, part: Part) -> Factors:
        assert isinstance(part.gradient, Factors)
        d_GRO, a_GRI, _ = part.gradient
        b_GO = row_sum(d_GRO) if self.sends_bias(part.slot) else None
        return Factors(d_GRO[:, : part.rows], a_GRI[:, : part.rows], b_GO)


FIRST_COMPRESSED_STEP = 2
"""First step in which PowerSGD compresses. Before it whole gradients are all-reduced, since DDP
rebuilds its buckets until then."""

ONE_BUCKET_MB = 1000
"""Bucket cap above the size of any model here, in MB."""


_WHOLE = (og.Auto, og.LocalSteps, og.PerLayer)
"""Methods of a whole model, which cannot be used for single layers."""
Attach = Callable[[nn.Module, dist.ProcessGroup | None], Replica]


def all_reduce_bytes(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Returns the bytes that a site sends to all-reduce all gradients in a ring.

    DDP also broadcasts buffers, which are not counted.
    """
    sites = dist.get_world_size() if group is None else group.size()
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return round(2 * (sites - 1) / sites * size)


def _plain(model: nn.Module, _group: dist.ProcessGroup | None) -> Replica:
    return Replica(model=model, planned_bytes=0)


def _ddp(model: nn.Module, group: dist.ProcessGroup | None, *, fp16: bool = False) -> Replica:
    wrapped = DistributedDataParallel(model, process_group=group)
    if fp16:
        wrapped.register_comm_hook(group, fp16_compress_hook)
    return Replica(model=wrapped, planned_bytes=all_reduce_bytes(model, group) // (1 + fp16))


def _powersgd(rank: int = 1) -> Attach:
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank={rank}; use 1 or more")

    def attach(model: nn.Module, group: dist.ProcessGroup | None) -> Replica:
        # The hook chains collectives per bucket. Those of two buckets start in an order that
        # depends on timing, and if sites differ in it, gloo ends the process. A cap above the
        # size of the model leaves one bucket, in the first step and after DDP rebuilds it.
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
    """An `Attach` that calls `og.distribute`.

    Attributes:
        method: Method of sending gradients.
        recorder: Recorder of every step.
        options: Further arguments of `og.distribute`.
        whole: True if the last exchange brings all that sites owe.
    """

    method: Method | og.Auto | og.PerLayer | og.LocalSteps
    recorder: Recorder | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False

    def __call__(self, model: nn.Module, group: dist.ProcessGroup | None) -> Replica:
        """Distributes the model.

        Raises:
            RecipeError: The method does not fit the model; raised at every site.
        """
        try:
            # buffers="local" as in the figures of docs/; experiments average them before a test.
            how = {"recorder": self.recorder, "buffers": "local", **self.options}
            session = og.distribute(model, self.method, group=group, **how)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        return Replica(
            model=model,
            session=session,
            start_bytes=session.stats().total_sent_bytes,
            period=getattr(self.method, "period", getattr(self.method, "every", 1)),
            weighted=self.options.get("weighting") == "samples",
            whole=self.whole,
        )

    def beside(self, local: Sequence[str], *, joint: bool) -> Distributed:
        """Returns a copy in which the parameters that match `local` stay on each site."""
        if isinstance(self.method, og.LocalSteps):
            inner = Distributed(self.method.method).beside(local, joint=joint).method
            return replace(self, method=replace(self.method, method=inner))
        if isinstance(self.method, og.Auto):
            raise ValueError("auto chooses for the whole model: name a method")
        assert not isinstance(self.method, og.PerLayer)
        methods = dict.fromkeys(local, og.Local())
        return Distributed(og.PerLayer({**methods, "*": self.method}, joint=joint))


def _edad(blocks: str = "", **settings: Any) -> Distributed:
    """EDAD; its blocks are written as ``blocks=encoder.*+decoder.*``."""
    return Distributed(og.EDAD(blocks=blocks.split("+") if blocks else (), **settings))


def _local_steps(
    k: int = 50,
    method: str = "dense",
    lr: float | None = None,
    momentum: float = 0.0,
    outer: str = "sgd",
    stream: int = 1,
    overlap: int = 0,
    alpha: float | None = None,
    error_reset: bool = False,
    quorum: float | None = None,
    grace: float | None = None,
    whole: bool = False,
) -> Distributed:
    """Federated averaging of equally weighted sites; DiLoCo with ``lr=0.7:momentum=0.9``.

    With ``outer=muon`` mean changes of matrices are made orthonormal (`og.optim.OuterMuon`), as far
    as ``lr`` says, with ``outer=muon-tables`` embeddings and the head, too. With ``whole=True`` the
    last exchange brings all that the sites owe.
    """
    inner = _attach_of(method)
    if not isinstance(inner, Distributed) or isinstance(inner.method, (og.Auto, og.LocalSteps)):
        raise ValueError(f"method={method}; use dense, rank-dad, og-powersgd or sparse")
    turns = {"stream": stream, "overlap": overlap, "alpha": alpha}
    turns |= {"quorum": quorum, "grace": grace}
    made = og.LocalSteps(
        k,
        outer=_outer(outer, lr, float(momentum)),
        method=inner.method,
        **turns,
        error_reset=error_reset,
    )
    return Distributed(made, whole=whole)


def _outer(name: str, lr: float | None, momentum: float) -> Outer:
    if name not in ("sgd", "muon", "muon-tables"):
        raise ValueError(f"outer={name}; use sgd, muon or muon-tables")
    if name == "sgd":
        return partial(
            SGD, lr=float(1 if lr is None else lr), momentum=momentum, nesterov=momentum > 0
        )
    if momentum:
        raise ValueError(f"momentum={momentum}; outer={name} has none: leave it out")
    settings = {} if lr is None else {"lr": float(lr)}
    return partial(og.optim.OuterMuon, **settings, tables=name == "muon-tables")


def _fedavg(k: int = 20, method: str = "dense") -> Distributed:
    """Federated averaging weighted by samples; `method` compresses the parameter changes."""
    made = _local_steps(k, method)
    return replace(made, options={"weighting": "samples"})


def _auto(among: str = "", **settings: Any) -> Distributed:
    """Auto; its candidates are written as ``among=rank-dad-8+sparse``."""
    methods = [_among(name) for name in among.split("+") if name]
    return Distributed(og.Auto(among=methods, **settings))


def _among(name: str) -> Method:
    made = _attach_of(name) if name in METHODS or name in CONFIGURABLE else None
    if not isinstance(made, Distributed) or isinstance(made.method, _WHOLE):
        raise ValueError(f"among={name}; use names as rank-dad-8+sparse, without settings")
    return made.method


class Family:
    """Methods that differ in their settings.

    Args:
        make: Builds a method from settings by name.
        settings_of: Callables whose arguments are valid settings, too.
    """

    def __init__(self, make: Callable[..., Attach], *settings_of: Callable[..., Any]) -> None:
        self._make = make
        arguments = [
            one for by in (make, *settings_of) for one in signature(by).parameters.values()
        ]
        self._known = sorted({one.name for one in arguments if one.kind != Parameter.VAR_KEYWORD})

    def __call__(self, **settings: Any) -> Attach:
        """Returns the method with these settings.

        Raises:
            ValueError: There is no such setting, or it cannot have that value.
        """
        for name in settings:
            if name not in self._known:
                told = f"there is no setting {name!r}{did_you_mean(name, self._known)}"
                raise ValueError(f"{told}; use {', '.join(self._known)}")
        return self._make(**settings)


def _ours(kind: Callable[..., Method]) -> Family:
    return Family(lambda **settings: Distributed(kind(**settings)), kind)


METHODS: dict[str, Attach] = {
    "pooled": _plain,
    "alone": _plain,
    "ddp": _ddp,
    "ddp-again": _ddp,
    "ddp-fp16": partial(_ddp, fp16=True),
    **{f"powersgd-{rank}": _powersgd(rank) for rank in (1, 2, 4, 8)},
    "dense": Distributed(og.Dense()),
    "dad": Distributed(og.DAD()),
    "dad-activations": Distributed(og.DAD(reveal="activations")),
    "edad": Distributed(og.EDAD()),
    "edad-raw": Distributed(og.EDAD(inputs="raw")),
    **{f"rank-dad-{rank}": Distributed(og.RankDAD(rank=rank)) for rank in (1, 2, 4, 8)},
}
"""Functions that prepare a model in place; each takes the model and its process group.

No group means the default one. Every site of the group must call it at the same point."""

CONFIGURABLE: dict[str, Family] = {
    "powersgd": Family(_powersgd),
    "dense": _ours(og.Dense),
    "dad": _ours(og.DAD),
    "edad": Family(_edad, og.EDAD),
    "rank-dad": _ours(og.RankDAD),
    "sparse": _ours(og.Sparse),
    "og-powersgd": _ours(og.PowerSGD),
    "first-rows": _ours(FirstRows),
    "local-steps": Family(_local_steps),
    "fedavg": Family(_fedavg),
    "auto": Family(_auto, og.Auto),
}
"""Methods that can be named with settings, e.g. ``rank-dad:rank=16:wire=topk0.1+int8``.

``method=`` starts an inner method with its own settings:
``local-steps:k=50:method=rank-dad:rank=4``."""


def attach_of(
    name: str,
    option: str = "--method",
    local: Sequence[str] = (),
    *,
    joint: bool = False,
    others: Mapping[str, Family] | None = None,
) -> Attach:
    """Returns the function that prepares a model for a named method.

    Args:
        name: A key of `METHODS`, or one of `CONFIGURABLE` with settings.
        option: Command-line option that contained the name, for the error.
        local: Patterns of parameters that each site keeps to itself.
        joint: True if the mean delta of all sites flows back into these.
        others: Further families, in addition to `CONFIGURABLE`.

    Raises:
        RecipeError: There is no such method or setting, or it cannot leave out parameters.
    """
    families = {**CONFIGURABLE, **(others or {})}
    try:
        attach = _attach_of(name, families)
    except KeyError as error:
        (kind,) = error.args
        raise RecipeError(
            f"{option} must be one of {', '.join(METHODS)}, or {' or '.join(families)} with "
            f"settings, as rank-dad:rank=16, not {name!r}{_hint(kind, families)}"
        ) from None
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{option} {name}: {error}") from error
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


def _hint(kind: str, families: Mapping[str, Family]) -> str:
    if kind in METHODS:
        return f": {kind} has no settings"
    return did_you_mean(kind, [*METHODS, *families])


def _attach_of(name: str, families: Mapping[str, Family] | None = None) -> Attach:
    """Returns the method of a name with settings.

    Raises:
        KeyError: There is no such kind; holds its name.
        TypeError: There is no such setting.
        ValueError: A setting has an invalid value.
    """
    if name in METHODS:
        return METHODS[name]
    if of_rank := re.fullmatch(r"(rank-dad|powersgd)-(\d+)", name):
        return CONFIGURABLE[of_rank[1]](rank=int(of_rank[2]))
    named, _, inner = name.partition(":method=")
    kind, *settings = named.split(":")
    found = read_settings(settings) | ({"method": inner} if inner else {})
    return (families or CONFIGURABLE)[kind](**found)
