"""What a site sends of a block in one step, and what comes of what all sites sent."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor

from outergrad.core.blocks import Block, Replayer, SentRun
from outergrad.core.coding import Codecs
from outergrad.core.errors import RefusedError, ReplayError
from outergrad.linalg.gradients import scaled
from outergrad.replay.block_tap import TappedBlock
from outergrad.replay.block_use import Use
from outergrad.replay.run import PREVIOUS, Message, PlacedRun, Shape, sent_run


class BlockMessage:
    """The uses of a block that a backward will capture, as they will be sent.

    Args:
        uses: in the order of forward.
        codecs: what numbers go through.
        replayer: computes them again.

    Attributes:
        nbytes: how long it is.
    """

    def __init__(self, uses: Sequence[Use], codecs: Codecs, replayer: Replayer) -> None:
        self._codecs, self._replayer = codecs, replayer
        self._sources: list[tuple[Use, str, int]] = []
        self._shapes: list[Shape] = []
        self._places: dict[Hashable, int] = {}
        self._message = Message([self._run(run) for run in _runs(uses)], self._shapes, codecs)
        self.nbytes = self._message.nbytes

    def _run(self, uses: Sequence[Use]) -> PlacedRun:
        links = [self._link(use, follows=k > 0) for k, use in enumerate(uses)]
        last = uses[-1]
        deltas = [self._add((last, "deltas", k), s) for k, s in enumerate(last.outputs)]
        return {"links": links, "deltas": deltas}

    def _link(self, use: Use, *, follows: bool) -> list[Any]:
        places = [
            PREVIOUS if follows and k == use.entry else self._place(use, k)
            for k in range(len(use.shapes))
        ]
        marks = [self._add((use, "marks", k), Shape.of(mark)) for k, mark in enumerate(use.marks)]
        return [use.member, use.about, places, *(marks or [None])]

    def _place(self, use: Use, k: int) -> int:
        """Of a tensor; what several uses are given, as a mask, is sent once."""
        if k not in use.constants:
            return self._add((use, "kept", k), use.shapes[k])
        tensor = use.constants[k][0]
        key = tensor.data_ptr(), tensor.stride(), use.shapes[k]
        if key not in self._places:
            self._places[key] = self._add((use, "kept", k), use.shapes[k])
        return self._places[key]

    def _add(self, source: tuple[Use, str, int], shape: Shape) -> int:
        self._sources.append(source)
        self._shapes.append(shape)
        return len(self._shapes) - 1

    def write(self, out: Tensor, scale: float) -> None:
        """Fills this site's part of a message, once all deltas have arrived: scale times these."""
        tensors = self.tensors
        for place, (_, kind, _) in enumerate(self._sources):
            if kind == "deltas":
                tensors[place] = scaled(tensors[place], scale)
        if self._codecs:
            self._mark_decoded(tensors)
        self._message.write(tensors, out)

    def _mark_decoded(self, tensors: list[Tensor]) -> None:
        """Puts in fingerprints of what the receivers' replays have to give.

        Codecs change what a block is given, and so what it gives: this site computes both.
        """
        runs = self._message.runs
        exact, decoded = (
            [sent_run(run, given) for run in runs]
            for given in (tensors, self._message.decoded(tensors))
        )
        marks = (mark for run in runs for *_, mark in run["links"])
        try:
            found = self._replayer.fingerprints(exact, decoded)
        except ReplayError:
            return  # it fails on all sites, which then say so
        for mark, one in zip(marks, found, strict=True):
            if mark is not None and one is not None:
                tensors[mark] = one

    @property
    def tensors(self) -> list[Tensor]:
        """What is sent."""
        for use in {id(use): use for use, _, _ in self._sources}.values():
            use.read()
        return [getattr(use, kind)[k] for use, kind, k in self._sources]


def _runs(uses: Sequence[Use]) -> list[list[Use]]:
    """The uses of which each reads the output of the one before, and nothing else does."""
    runs: list[list[Use]] = []
    for use in uses:
        run = next((r for r in runs if use.linked and r[-1] is use.previous), None)
        if run is None:
            runs.append([use])
        else:
            run.append(use)
    return runs


class Blocks:
    """The blocks of a session, in the order in which headers count them."""

    def __init__(self) -> None:
        self._tapped: dict[Block, TappedBlock] = {}
        self._messages: dict[Block, BlockMessage] = {}

    def add(self, tapped: TappedBlock) -> None:
        """Takes in the next one."""
        self._tapped[tapped.block] = tapped

    def __iter__(self) -> Iterator[TappedBlock]:
        return iter(self._tapped.values())

    def __getitem__(self, block: Block) -> TappedBlock:
        return self._tapped[block]

    def announce(self, block: Block) -> BlockMessage:
        """What the current backward will capture of it."""
        tapped = self._tapped[block]
        self._messages[block] = BlockMessage(tapped.uses(), tapped.codecs, tapped.replayer)
        return self._messages[block]

    def message(self, block: Block) -> BlockMessage:
        """What was announced of it."""
        return self._messages[block]

    def unrepeated(self, param: str, told: str) -> str | None:
        """What to say of the module with a parameter whose replay was not like its forward."""
        found = (block.unrepeated(param, told) for block in self)
        return next((said for said in found if said is not None), None)

    def forget(self) -> None:
        """The step is over: lets go of activations and deltas, and counts what passes anew."""
        self._messages.clear()
        for tapped in self:
            tapped.untapped_nbytes = 0


def block_gradients(
    tapped: TappedBlock, data_S: Sequence[Tensor | None], scale: float, rank: int
) -> dict[str, Tensor]:
    """Gradients of a block's parameters: the sum over the sites, in their order, times scale.

    Args:
        tapped: the block.
        data_S: what each site sent; None where it did not use the block.
        scale: for all.
        rank: of this site.

    Raises:
        RefusedError: what a site sent cannot be read or computed again, or does not give what that
            site had in forward.
    """
    runs_S = [_runs_of(tapped, site, data, scale) for site, data in enumerate(data_S)]
    pairs = [(site, run) for site, runs in enumerate(runs_S) for run in runs]
    try:
        return tapped.gradients([run._replace(site=s, own=s == rank) for s, run in pairs])
    except RefusedError:
        raise
    except Exception as error:
        # It comes of one site's runs alone; if all raise, it is not for what they sent.
        odd = [rank for rank, runs in enumerate(runs_S) if runs and not _works(tapped, runs)]
        if odd and len(odd) < sum(map(bool, runs_S)):
            what = f"what site {odd[0]} sent of {tapped.block.name!r} cannot be computed: {error}"
            raise RefusedError(what, odd[0]) from error
        raise


def _runs_of(tapped: TappedBlock, rank: int, data: Tensor | None, scale: float) -> list[SentRun]:
    try:
        runs, tensors = ([], []) if data is None else Message.read(data, tapped.codecs)
        return [sent_run(run, tensors, scale) for run in runs]
    except Exception as error:  # codecs may be the user's, and raise what they like
        what = f"what site {rank} sent of {tapped.block.name!r} cannot be read: {error}"
        raise RefusedError(what, rank) from error


def _works(tapped: TappedBlock, runs: list[SentRun]) -> bool:
    try:
        tapped.replayer.gradients(runs)
    except Exception:
        return False
    return True
