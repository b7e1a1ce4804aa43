"""Graphs of sites: which pairs exchange after which step, the same on every site."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Edge = tuple[int, int]
"""Two ranks: the lower one first, or, in a directed graph, the sender first."""


class Graph(Protocol):
    """Says which sites are neighbours; a pure function of the number of sites and of the step."""

    directed: bool
    """True if messages of an edge go one way: from its first site to its second."""

    def edges(self, sites: int, step: int = 0) -> tuple[Edge, ...]:
        """Returns the edges of a step, sorted, each once.

        Raises:
            ValueError: there is no such graph of so many sites.
        """
        ...

    def period(self, sites: int) -> int:
        """Returns the number of steps after which all edges have been there."""
        return 1

    def all_edges(self, sites: int) -> Collection[Edge]:
        """Returns the edges of all steps together."""
        return {edge for step in range(self.period(sites)) for edge in self.edges(sites, step)}


@dataclass(frozen=True)
class Ring(Graph):
    """Every site has two neighbours; with `directed` it sends to the next one alone.

    Choose it where sites are in a row, or links few. Its spectral gap falls with the square of the
    number of sites.

    Attributes:
        directed: Whether each site sends to the next one, and hears the one before it.
    """

    directed: bool = False

    def edges(self, sites: int, step: int = 0) -> tuple[Edge, ...]:
        """Returns the S edges of a ring; one of two sites, and none of a single site."""
        following = ((site, (site + 1) % sites) for site in range(sites) if sites > 1)
        return _sorted(following, directed=self.directed)


@dataclass(frozen=True)
class Torus(Graph):
    """A grid whose borders meet, as near to a square as the number of sites allows.

    Every site has four neighbours, where a side is two sites long three. Choose it in place of a
    ring where there are many sites.
    """

    directed = False

    def edges(self, sites: int, step: int = 0) -> tuple[Edge, ...]:
        """Returns the edges to the right and downwards.

        Raises:
            ValueError: the number of sites has no two factors above 1.
        """
        rows = max((n for n in range(1, math.isqrt(sites) + 1) if sites % n == 0), default=1)
        if rows == 1:
            raise ValueError(
                f"graph='torus' of {sites} sites: {sites} is no product of two numbers above 1; "
                f"use 'ring', or another number of sites"
            )
        columns = sites // rows
        right = ((s, s // columns * columns + (s + 1) % columns) for s in range(sites))
        down = ((s, (s + columns) % sites) for s in range(sites))
        return _sorted([*right, *down])


@dataclass(frozen=True)
class Complete(Graph):
    """Every site is the neighbour of every other: one exchange makes all equal."""

    directed = False

    def edges(self, sites: int, step: int = 0) -> tuple[Edge, ...]:
        """Returns the S (S - 1) / 2 pairs."""
        return tuple((i, j) for i in range(sites) for j in range(i + 1, sites))


@dataclass(frozen=True)
class Exponential(Graph):
    """One peer per step, at a distance that doubles from step to step.

    Choose it where every site reaches every other: it costs one message per step, and after log2(S)
    steps all S sites have averaged with each other, if S is a power of two. Source: Ying et al.,
    "Exponential Graph is Provably Efficient for Decentralized Deep Learning", arXiv 2110.13363.

    Attributes:
        directed: Whether site i sends to i + 2^k, of any number of sites. Otherwise pairs differ in
            the k-th bit of their ranks; of other numbers of sites than powers of two some sites
            then rest in some steps.
    """

    directed: bool = False

    def edges(self, sites: int, step: int = 0) -> tuple[Edge, ...]:
        """Returns the edges of distance 2^k, with k the step modulo `period`."""
        far = 1 << step % self.period(sites)
        if self.directed:
            return _sorted(((i, (i + far) % sites) for i in range(sites) if sites > 1), True)
        return _sorted((i, i ^ far) for i in range(sites) if i ^ far < sites)

    def period(self, sites: int) -> int:
        """Returns the number of bits of a rank."""
        return max((sites - 1).bit_length(), 1)


@dataclass(frozen=True)
class RandomPairs(Graph):
    """Pairs that are drawn anew for each step, from a seed that all sites share.

    Of an odd number of sites one rests. Choose it where every site reaches every other, and no
    link should be used in every step, as in NoLoCo (arXiv 2506.10911).

    Attributes:
        seed: Seed of the draws.
    """

    seed: int = 0
    directed = False

    def edges(self, sites: int, step: int = 0) -> tuple[Edge, ...]:
        """Returns the pairs of a step: of neighbours in an order by digests, alike everywhere."""
        order = sorted(range(sites), key=lambda site: self._draw(step, site))
        return _sorted(zip(order[::2], order[1::2], strict=False))

    def period(self, sites: int) -> int:
        """Returns a number of steps in which draws have connected all sites, in all likelihood."""
        return 16 * max(sites, 1)

    def all_edges(self, sites: int) -> Collection[Edge]:
        """Returns all pairs: a pair that has not been drawn in a period may be drawn later."""
        return Complete().edges(sites)

    def _draw(self, step: int, site: int) -> bytes:
        return hashlib.sha256(f"{self.seed} {step} {site}".encode()).digest()


@dataclass(frozen=True)
class Lossy(Graph):
    """A graph of which some edges are left out in each step, drawn from a seed of all sites.

    Choose it to see how a training bears links that fail, or to use each link in a part of the
    steps alone. Where the graph is directed the two ways of a pair are drawn by themselves.

    Attributes:
        graph: The whole graph, or its name.
        share: Share of the edges of a step that is left out on average, from 0 to below 1.
        seed: Seed of the draws.
    """

    graph: str | Path | Graph
    share: float
    seed: int = 0
    directed: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if type(self.share) not in (int, float) or not 0 <= self.share < 1:
            raise ValueError(f"Lossy: share={self.share!r}; use a number from 0 to below 1")
        object.__setattr__(self, "graph", graph_of(self.graph))
        object.__setattr__(self, "directed", self._whole.directed)

    def edges(self, sites: int, step: int = 0) -> tuple[Edge, ...]:
        """Returns the edges of a step that are left."""
        edges = self._whole.edges(sites, step)
        return tuple(edge for edge in edges if self._draw(step, edge) >= self.share)

    def period(self, sites: int) -> int:
        """Returns a number of steps in which no edge has been lost each time, in all likelihood."""
        times = math.ceil(math.log(1e-6) / math.log(self.share)) if self.share else 1
        return times * self._whole.period(sites)

    def all_edges(self, sites: int) -> Collection[Edge]:
        """Returns the edges of the whole graph: none is left out for ever."""
        return self._whole.all_edges(sites)

    @property
    def _whole(self) -> Graph:
        return self.graph  # type: ignore[return-value]

    def _draw(self, step: int, edge: Edge) -> float:
        digest = hashlib.sha256(f"{self.seed} {step} {edge[0]} {edge[1]}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / (1 << 48)


@dataclass(frozen=True)
class EdgeList(Graph):
    """Edges that are given one by one; `edge_list` reads them from a file.

    Attributes:
        pairs: Ranks of neighbours, from 0 on.
        directed: Whether the first of a pair sends to the second, and not the other way.
    """

    pairs: tuple[Edge, ...]
    directed: bool = False

    def __post_init__(self) -> None:
        pairs = tuple((int(i), int(j)) for i, j in self.pairs)
        if not pairs or any(site < 0 for pair in pairs for site in pair):
            raise ValueError("EdgeList: pairs are ranks from 0 on, one pair or more")
        alone = next((i for i, j in pairs if i == j), None)
        if alone is not None:
            raise ValueError(
                f"EdgeList: rank {alone} is its own neighbour: leave ({alone}, {alone}) out, every "
                f"site keeps a share of its own weights anyway"
            )
        object.__setattr__(self, "pairs", _sorted(pairs, directed=self.directed))

    def edges(self, sites: int, step: int = 0) -> tuple[Edge, ...]:
        """Returns the edges.

        Raises:
            ValueError: they are of another number of sites.
        """
        known = 1 + max(site for pair in self.pairs for site in pair)
        if known != sites:
            raise ValueError(
                f"the edges are of {known} sites, rank 0 to {known - 1}, and there are {sites}: "
                f"give every site a neighbour, or start {known} sites"
            )
        return self.pairs


def edge_list(path: str | Path, *, directed: bool = False) -> EdgeList:
    """Reads a graph from a file: a line per edge, of two ranks; what follows a # is left out.

    Args:
        path: of a text file, alike on all sites.
        directed: whether the first site of a line sends to the second, and not the other way.

    Raises:
        ValueError: a line is no edge; names it.
        OSError: the file cannot be read.
    """
    pairs: list[Edge] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdecimal() for word in words):
            raise ValueError(
                f"{path}, line {number}: {line.strip()!r} is no edge; write two ranks, as 0 1"
            )
        pairs.append((int(words[0]), int(words[1])))
    try:
        return EdgeList(tuple(pairs), directed)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


NAMED: dict[str, Graph] = {
    "ring": Ring(),
    "torus": Torus(),
    "complete": Complete(),
    "exponential": Exponential(),
    "random": RandomPairs(),
}
"""Graphs by the names that `og.Gossip(graph=...)` knows."""


def graph_of(given: object) -> Graph:
    """Returns a graph by its name, from a file, or as it was given.

    Raises:
        ValueError: there is no such graph, and no such file.
        TypeError: it is no graph.
    """
    if isinstance(given, str) and given in NAMED:
        return NAMED[given]
    if isinstance(given, str | Path):
        if Path(given).is_file():
            return edge_list(given)
        names = ", ".join(map(repr, NAMED))
        raise ValueError(
            f"Gossip: graph={str(given)!r} is no graph and no file; use {names}, or a path"
        )
    if isinstance(given, type) or not callable(getattr(given, "edges", None)):
        raise TypeError(f"Gossip: graph={given!r}; use 'ring', or a graph, as og.gossip.Ring()")
    return given  # type: ignore[return-value]


def neighbours(graph: Graph, sites: int, rank: int) -> list[int]:
    """Returns all sites that a site may exchange with, in any step."""
    return sorted({i + j - rank for i, j in graph.all_edges(sites) if rank in (i, j)})


def refuse_disconnected(graph: Graph, sites: int) -> None:
    """Checks that what one site learns reaches all others.

    Raises:
        ValueError: it does not; or there is no such graph of so many sites.
    """
    pairs = set(graph.all_edges(sites))
    ways = [pairs, {(j, i) for i, j in pairs}]
    if not graph.directed:
        ways = [ways[0] | ways[1]]
    for way in ways:  # a directed graph both ways: from site 0 to all, and from all to site 0
        apart = sorted(set(range(sites)) - _reached(way))
        if apart:
            raise ValueError(
                f"graph={graph!r} does not connect rank {apart[0]} and rank 0 of {sites} sites"
                f"{' both ways' if graph.directed else ''}: add edges, or use 'ring'"
            )


def _reached(pairs: Collection[Edge]) -> set[int]:
    found, new = {0}, {0}
    while new:
        new = {j for i, j in pairs if i in new} - found
        found |= new
    return found


def _sorted(
    pairs: Iterator[Edge] | Sequence[Edge] | zip[tuple[int, int]], directed: bool = False
) -> tuple[Edge, ...]:
    found = {(i, j) if directed or i < j else (j, i) for i, j in pairs}
    return tuple(sorted((i, j) for i, j in found if i != j))
