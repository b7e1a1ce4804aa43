"""Strategies that draw what is done with a model: methods, and steps of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from fuzz.graphs import graphs
from fuzz.nodes import BUILD, Graph
from hypothesis import strategies as st

import outergrad as og

FULL = 1000
"""A rank that every matrix of a graph is below."""

EXACT: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(),
    "dad forced": og.DAD(always=True),
    "dad raw": og.DAD(reveal="activations"),
    "dad raw forced": og.DAD(always=True, reveal="activations"),
    "dad forced, small buckets": og.DAD(always=True, bucket_bytes=1),
    "dad forced, every 2nd": og.DAD(always=True, every=2),
    "dad, every 3rd": og.DAD(every=3),
    "edad": og.EDAD(),
    "edad forced": og.EDAD(always=True),
    "edad raw forced": og.EDAD(always=True, inputs="raw"),
    "edad raw forced, small buckets": og.EDAD(always=True, inputs="raw", bucket_bytes=1),
    "edad, every 2nd": og.EDAD(every=2, always=True, inputs="raw"),
    "rank-dad, gather": og.RankDAD(rank=FULL, reduce="gather"),
    "rank-dad, gather, dense memory": og.RankDAD(rank=FULL, error_feedback="dense"),
    "rank-dad, all_reduce": og.RankDAD(rank=FULL, reduce="all_reduce"),
    "rank-dad, two_way": og.RankDAD(rank=FULL, reduce="two_way"),
    "powersgd": og.PowerSGD(rank=FULL, min_ratio=1),
    "sparse": og.Sparse(density=1.0, always=True),
    "sparse, random": og.Sparse(density=1.0, select="random", always=True),
    "sparse, random blocks": og.Sparse(density=1.0, select="random_blocks", block=5, always=True),
}

LOW_RANK: dict[str, Any] = {
    f"{reduce}, {feedback}, rank {rank}": og.RankDAD(
        rank=rank, reduce=reduce, error_feedback=feedback
    )
    for reduce in ("gather", "two_way", "all_reduce", "alternate")
    for feedback in ("factored", "dense")
    for rank in (1, 2)
} | {
    "gather, tolerance": og.RankDAD(rank=3, tolerance=0.3, reduce="gather"),
    "two_way, tolerance": og.RankDAD(rank=3, tolerance=0.3, reduce="two_way"),
    "all_reduce, tolerance": og.RankDAD(rank=3, tolerance=0.3, reduce="all_reduce"),
    "alternate, tolerance": og.RankDAD(rank=3, tolerance=0.3, reduce="alternate"),
    "alternate, small buckets": og.RankDAD(rank=1, reduce="alternate", bucket_bytes=1),
    "small buckets": og.RankDAD(rank=1, reduce="gather", bucket_bytes=1),
    "two_way, small buckets": og.RankDAD(rank=1, reduce="two_way", bucket_bytes=1),
    "few bits": og.RankDAD(rank=2, wire=og.wire.Int4(), vectors=og.wire.Int4()),
    "two_way, few bits": og.RankDAD(
        rank=1, reduce="two_way", wire=og.wire.Int3(), vectors=og.wire.Int4()
    ),
    "gather, vectors, dense memory": og.RankDAD(
        rank=1, vectors=og.wire.Int2(), error_feedback="dense"
    ),
    "budget": og.RankDAD(budget=1 << 14, wire=og.wire.Int4(), vectors=og.wire.Int4()),
    "budget, two_way, small buckets": og.RankDAD(
        budget=1 << 15,
        reduce="two_way",
        wire=og.wire.Int4(),
        vectors=og.wire.Int4(),
        bucket_bytes=1,
    ),
    "powersgd": og.PowerSGD(rank=1, min_ratio=1),
    "sparse": og.Sparse(density=0.2, always=True),
    "sparse, blocks, int8": og.Sparse(
        density=0.2, select="blocks", block=3, wire=og.wire.Int8(), always=True
    ),
    "sparse, random": og.Sparse(density=0.2, select="random", always=True, bucket_bytes=1),
    "sparse, warm-up": og.Sparse(density=0.05, warmup=3),
}
"""All of them remember what they do not send, of matrices as small as these."""


class Brief:
    """A dataclass that shows what is not the default."""

    def __repr__(self) -> str:
        values = [(f, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        shown = [f"{f.name}={value!r}" for f, value in values if value != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Pass(Brief):
    """One forward and backward on every site.

    Attributes:
        rows: of each site.
        sync: whether the sites share, or stay inside `no_sync`.
        on: of each site, whether optional parts are in use.
        early: of each site, whether the loss is that of the early node alone.
        data: what the batches are like.
        twice: whether the graph is kept for a second backward: inside `no_sync`, or shared too.
        beside: what else runs in forward: nothing, or a pass without a graph or without backward.
        some: backward only to every so many-th parameter; 0 for all.
        boom: of each site, whether backward raises.
        nets: which of the models are in the loss.
    """

    rows: tuple[int, ...]
    sync: bool = True
    on: tuple[bool, ...] = (True,) * 4
    early: tuple[bool, ...] = (False,) * 4
    data: str = "normal"
    twice: str = ""
    beside: str = ""
    some: int = 0
    boom: tuple[bool, ...] = (False,) * 4
    nets: tuple[int, ...] = (0,)


@dataclass(frozen=True, repr=False)
class Step(Brief):
    """Passes that add up.

    Attributes:
        passes: one after another.
        zero: what becomes of the gradients before: "none", "in place" or "kept".
        forwards_first: whether all forwards come before all backwards.
        shrink: whether the weights change behind it.
    """

    passes: tuple[Pass, ...]
    zero: str = "none"
    forwards_first: bool = False
    shrink: bool = False


@dataclass(frozen=True, repr=False)
class Program(Brief):
    """Models, their methods, and steps."""

    sites: int
    nets: tuple[Graph, ...]
    methods: tuple[Any, ...]
    steps: tuple[Step, ...]

    @property
    def cadence(self) -> int:
        """At least some parameters travel only at every so many-th pass, if it is above 1."""
        return max(getattr(part, "every", 1) for part in self.parts)

    @property
    def parts(self) -> list[Any]:
        """The methods, those of `PerLayer` one by one."""
        own = ([*m.methods.values()] if isinstance(m, og.PerLayer) else [m] for m in self.methods)
        return [part for parts in own for part in parts]


ROWS = st.sampled_from([2, 0, 1, 3, 5, 9])
RARELY = st.sampled_from([False] * 7 + [True])


def _per_site(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(*[values] * 4)


@st.composite
def passes(draw: Callable[[Any], Any], nets: int, has_early: bool, alike: bool) -> Pass:
    """Draws a pass; alike: the same on all sites."""
    each = _alike if alike else _per_site
    odd = draw(RARELY)
    return Pass(
        rows=draw(each(ROWS)),
        sync=draw(st.sampled_from([True, True, False])),
        on=draw(each(st.booleans())),
        early=draw(each(RARELY)) if has_early else (False,) * 4,
        data=draw(st.sampled_from(["normal", "normal", "normal", "zeros", "one row"])),
        twice=draw(st.sampled_from(["no_sync", "shared"])) if odd else "",
        beside=draw(st.sampled_from(["", "", "", "no_grad", "no backward"])),
        some=draw(st.sampled_from([2, 3])) if draw(RARELY) else 0,
        nets=draw(st.sampled_from([(0,), (1,), (0, 1), (1, 0)])) if nets > 1 else (0,),
    )


def _alike(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return values.map(lambda value: (value,) * 4)


@st.composite
def steps(
    draw: Callable[[Any], Any],
    nets: tuple[Graph, ...],
    *,
    alike: bool,
    cadence: int,
    may_raise: bool,
    once: bool,
) -> tuple[Step, ...]:
    """Draws steps, of which some come again and again, so that they are foreseen."""
    has_early = any(net.early is not None for net in nets)
    found: list[Step] = []
    while len(found) < 5 and (not found or draw(st.integers(0, 3))):
        one = passes(len(nets), has_early, alike)
        parts = draw(st.lists(one, min_size=1, max_size=1 if cadence > 1 else 3))
        zero = (
            "none" if cadence > 1 else draw(st.sampled_from(["none", "none", "in place", "kept"]))
        )
        step = Step(tuple(parts), zero, draw(st.booleans()), draw(st.booleans()))
        step = _once(step) if once else step
        found += [step] * draw(st.sampled_from([1, 1, 1, 3]))
        if draw(RARELY) and may_raise:
            found.append(_with_boom(step, draw(_per_site(st.booleans()))))
    return tuple(found)


def _once(step: Step) -> Step:
    """The same with one exchange, of what has come since the one before."""
    local = [replace(part, sync=False) for part in step.passes[:-1]]
    last = step.passes[-1]
    last = replace(last, sync=True, twice=last.twice.replace("shared", "no_sync"))
    return replace(step, passes=(*local, last), zero="none")


def _with_boom(step: Step, boom: tuple[bool, ...]) -> Step:
    last = step.passes[-1]
    calm = {"early": (False,) * 4, "twice": "", "some": 0, "nets": (0,)}
    return replace(step, passes=(*step.passes[:-1], replace(last, boom=boom, **calm)))


@st.composite
def per_layer(draw: Callable[[Any], Any], graph: Graph, table: dict[str, Any]) -> og.PerLayer:
    """Draws methods by pattern."""
    names = [f"{name}*" for name in _with_parameters(graph)]
    patterns = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    methods = st.sampled_from([*table.values(), og.Local()])
    last = st.sampled_from(list(table.values()))
    return og.PerLayer({**{p: draw(methods) for p in patterns}, "*": draw(last)})


def _with_parameters(graph: Graph) -> list[str]:
    places = enumerate(node.kind for node in graph.nodes)
    return [f"n{i}" for i, kind in places if kind in BUILD and kind != "activation"]


@st.composite
def methods(draw: Callable[[Any], Any], graph: Graph, table: dict[str, Any]) -> Any:
    """Draws a method."""
    kind = draw(st.sampled_from(["table"] * 5 + ["per layer", "per layer", "blocks"]))
    if kind == "per layer":
        return draw(per_layer(graph, table))
    if kind == "blocks" and table is EXACT:
        names = st.sampled_from(_with_parameters(graph))
        blocks = draw(st.lists(names, min_size=1, max_size=3, unique=True))
        return og.EDAD(always=draw(st.booleans()), inputs="raw", blocks=blocks)
    return table[draw(st.sampled_from(list(table)))]


@st.composite
def programs(
    draw: Callable[[Any], Any],
    *,
    table: dict[str, Any] = EXACT,
    dtypes: tuple[str, ...] = ("float32", "float32", "float64", "autocast"),
    alike: bool = False,
    once: bool = False,
) -> Program:
    """Draws models, methods and steps.

    Args:
        table: methods by name.
        dtypes: to choose from.
        alike: all sites have the same batches.
        once: every step has one exchange, and begins without gradients.
    """
    dtype = draw(st.sampled_from(dtypes))
    sites = draw(st.sampled_from([2, 2, 3, 1, 4] if not alike else [2, 3, 4]))
    count = draw(st.sampled_from([1, 1, 1, 1, 2] if not alike else [1]))
    nets = tuple(draw(graphs(dtype, 8 if count == 1 else 3)) for _ in range(count))
    chosen = tuple(draw(methods(net, table)) for net in nets)
    made = Program(sites, nets, chosen, ())
    # A backward that raises before it reaches anything shared has not begun for the other sites.
    may_raise = not alike and made.cadence == 1 and "Local" not in repr(chosen)
    how = {"cadence": made.cadence, "may_raise": may_raise, "once": once}
    played = draw(steps(nets, alike=alike, **how))
    return Program(sites, nets, chosen, played)
