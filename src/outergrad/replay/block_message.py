"""Messages of a block in one step: written by its site, and read into gradients by every site."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor

from outergrad.core.blocks import Block, Replayer, SentRun
from outergrad.core.coding import Codecs
from outergrad.core.errors import RefusedError, ReplayError
from outergrad.linalg.gradients import scaled
from outergrad.replay.block_tap import TappedBlock
from outergrad.replay.block_use import PREVIOUS, Message, PlacedRun, Shape, Use, sent_run


class BlockMessage:
    """Message with the uses of a block that the current backward pass will capture.

    Args:
        uses: the uses, in the order of the forward pass.
        codecs: encode the floating tensors.
        replayer: recomputes the uses.

    Attributes:
        nbytes: length of the message.
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
        """Index of an input tensor in the message; one that several uses read is sent once."""
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
        """Writes this site's payload once all deltas have arrived, with these times `scale`."""
        tensors = self.tensors
        for place, (_, kind, _) in enumerate(self._sources):
            if kind == "deltas":
                tensors[place] = scaled(tensors[place], scale)
        if self._codecs:
            self._mark_decoded(tensors)
        self._message.write(tensors, out)

    def _mark_decoded(self, tensors: list[Tensor]) -> None:
        """Replaces the fingerprints by those of a replay from the decoded tensors.

        Lossy codecs change a block's inputs and so its outputs, hence the fingerprints of the
        forward pass do not fit. This site computes what the receivers will get.
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
            return  # the replay then fails on every site, and each raises
        for mark, one in zip(marks, found, strict=True):
            if mark is not None and one is not None:
                tensors[mark] = one

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors to send, verified as unchanged since their deltas arrived."""
        for use in {id(use): use for use, _, _ in self._sources}.values():
            use.read()
        return [getattr(use, kind)[k] for use, kind, k in self._sources]


def _runs(uses: Sequence[Use]) -> list[list[Use]]:
    """Groups uses into runs, in which each use is the only reader of the output before it."""
    runs: list[list[Use]] = []
    for use in uses:
        run = next((r for r in runs if use.linked and r[-1] is use.previous), None)
        if run is None:
            runs.append([use])
        else:
            run.append(use)
    return runs


class Blocks:
    """Blocks of a session, in the order in which headers count them."""

    def __init__(self) -> None:
        self._tapped: dict[Block, TappedBlock] = {}
        self._messages: dict[Block, BlockMessage] = {}

    def add(self, tapped: TappedBlock) -> None:
        """Appends a block."""
        self._tapped[tapped.block] = tapped

    def __iter__(self) -> Iterator[TappedBlock]:
        return iter(self._tapped.values())

    def __getitem__(self, block: Block) -> TappedBlock:
        return self._tapped[block]

    def announce(self, block: Block) -> BlockMessage:
        """Returns the message that the current backward pass will send for a block."""
        tapped = self._tapped[block]
        self._messages[block] = BlockMessage(tapped.uses(), tapped.codecs, tapped.replayer)
        return self._messages[block]

    def message(self, block: Block) -> BlockMessage:
        """Returns the message announced for a block."""
        return self._messages[block]

    def unrepeated(self, param: str, told: str) -> str | None:
        """Returns the error text for the module that owns a parameter, or None if no block has it.

        Args:
            param: full name of the parameter.
            told: start of the sentence: which computation differed from the forward pass.
        """
        found = (block.unrepeated(param, told) for block in self)
        return next((said for said in found if said is not None), None)

    def forget(self) -> None:
        """Drops the step's messages, hence activations and deltas, and resets the byte counts."""
        self._messages.clear()
        for tapped in self._tapped.values():
            tapped.untapped_nbytes = 0


def block_gradients(
    tapped: TappedBlock, data_S: Sequence[Tensor | None], scale: float, rank: int
) -> dict[str, Tensor]:
    """Returns the gradients of a block's parameters: `scale` times the sum over the sites.

    The sum goes in the order of the sites.

    Args:
        tapped: the block.
        data_S: payload of each site; None where a site did not use the block.
        scale: factor of every gradient.
        rank: rank of this site.

    Raises:
        RefusedError: a site's payload cannot be read or replayed, or its replay differs from that
            site's forward pass.
    """
    runs_S = [_runs_of(tapped, site, data, scale) for site, data in enumerate(data_S)]
    pairs = [(site, run) for site, runs in enumerate(runs_S) for run in runs]
    try:
        return tapped.gradients([run._replace(site=s, own=s == rank) for s, run in pairs])
    except RefusedError:
        raise
    except Exception as error:
        # Blame a site only if its runs alone raise; if every site's do, no payload is at fault.
        odd = [rank for rank, runs in enumerate(runs_S) if runs and not _works(tapped, runs)]
        if odd and len(odd) < sum(map(bool, runs_S)):
            what = f"{tapped.block.name!r} cannot be computed from a message: {error}"
            raise RefusedError(what, odd[0]) from error
        raise


def _runs_of(tapped: TappedBlock, rank: int, data: Tensor | None, scale: float) -> list[SentRun]:
    try:
        runs, tensors = ([], []) if data is None else Message.read(data, tapped.codecs)
        return [sent_run(run, tensors, scale) for run in runs]
    except Exception as error:  # codecs may be the user's, and raise what they like
        what = f"a message of {tapped.block.name!r} cannot be read: {error}"
        raise RefusedError(what, rank) from error


def _works(tapped: TappedBlock, runs: list[SentRun]) -> bool:
    try:
        tapped.replayer.gradients(runs)
    except Exception:
        return False
    return True
