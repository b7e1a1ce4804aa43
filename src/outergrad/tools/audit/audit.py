"""The audit: every method at every batch size, by what its messages tell each observer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outergrad.core.sent import Way
from outergrad.launch.errors import RecipeError
from outergrad.tools.audit.campaign import Campaign
from outergrad.tools.audit.findings import Finding, Truth
from outergrad.tools.audit.observed import Asked, Batches, observed
from outergrad.tools.audit.observers import Observers
from outergrad.tools.audit.places import places_of
from outergrad.tools.audit.recorded import recorded
from outergrad.tools.audit.subjected import Subjected, subjected
from outergrad.tools.audit.view import View, is_summed, masked, view_of, ways_of

_OPEN = "a hub that is not blind; a listener on an open link"
_WHO = {
    frozenset({Way.SUMMED}): f"{_OPEN}; the other of two sites",
    frozenset({Way.GATHERED}): f"every other site; {_OPEN}",
}
"""Who sees all that a site sends, where all its messages go one way; `_OPEN` otherwise."""

SITES = 3
"""Two that are looked at, and one that looks: with less, a sum is the other site's part."""
READER = SITES - 1
"""The site that looks."""
CANARIES = 32
"""Rows beside the batches, which no attack may find in them."""

PART, SITE, SUM, MASKED = "a part", "by one site", "a sum of 2", "masked"


@dataclass(frozen=True, kw_only=True)
class Question:
    """An audit to be made.

    Attributes:
        model: Name of a workload, or ``module:factory``.
        methods: Names of methods, with an ε behind `@` where they are private.
        rows: Batch sizes.
        positions: Length to which texts are cut; None for their own.
        matching: Whether to match inputs by optimisation, which takes minutes.
        data_dir: Folder of the data sets, whose rows named workloads have where they are there.
        recorded: File of `og.FileTap`, whose steps are attacked instead of methods.
        lr: Learning rate of the steps between two exchanges, if the file is of `og.LocalSteps`.
    """

    model: str
    methods: Sequence[str]
    rows: Sequence[int] = (1, 8, 32)
    positions: int | None = None
    matching: bool = False
    data_dir: Path | None = None
    recorded: Path | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            RecipeError: One of them is too small.
        """
        if not self.rows or min(self.rows) < 1:
            raise RecipeError(f"--rows must be numbers of 1 and more, not {list(self.rows)}")
        if self.positions is not None and self.positions < 1:
            raise RecipeError(f"--positions must be 1 or more, not {self.positions}")
        if self.lr is not None and not 0 < self.lr < inf:
            raise RecipeError(f"--lr must be above 0, not {self.lr}")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Findings of all attacks in what one kind of observer sees.

    Attributes:
        method: Name of the method.
        rows: Batch size of a site.
        observer: What is seen: `PART`, `SITE`, `SUM` or `MASKED`.
        who: Who sees that, in words.
        source: Where the rows are from, in words.
        findings: Of every attack that fits the model.
        texts: Texts that came back, where it is known how to decode them.
        refused: Why the method does not go with the model; empty if it does.
    """

    method: str
    rows: int
    observer: str
    who: str
    source: str = ""
    findings: Sequence[Finding] = ()
    texts: Sequence[str] = ()
    refused: str = ""

    @property
    def worst(self) -> Finding | None:
        """The attack that found most; None without one."""
        return max(self.findings, key=lambda one: one.share, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Returns it in JSON types, without pairs of tensors."""
        names = ("method", "rows", "observer", "who", "source", "refused", "texts")
        told = {name: getattr(self, name) for name in names}
        found = [{n: v for n, v in vars(f).items() if n != "pairs"} for f in self.findings]
        return told | {"findings": found}


def audit(question: Question, progress: Callable[[str], None] = lambda told: None) -> list[Seen]:
    """Runs every method at every batch size in one process, and attacks what it sends.

    Args:
        question: What to audit.
        progress: Told of each method and batch size before it begins.

    Raises:
        RecipeError: There is no such method or model.
    """
    if question.recorded is not None:
        return [*_of_file(question, question.recorded, progress)]
    asked = [Asked.of(name) for name in question.methods]
    most = max(question.rows) * max(one.steps for one in asked) * SITES
    found = subjected(question.model, most + CANARIES, question.positions, question.data_dir)
    seen: list[Seen] = []
    for one in asked:
        for rows in question.rows:
            progress(f"{one.name}, {rows} {'row' if rows == 1 else 'rows'}")
            seen += _audited(found, one, rows, matching=question.matching)
    return seen


def _audited(found: Subjected, asked: Asked, rows: int, *, matching: bool) -> Iterator[Seen]:
    batches_S = [_batches(found, asked, rows, site) for site in range(SITES)]
    about = {"method": asked.name, "rows": rows, "source": found.source}
    try:
        sent_S = observed(found.model, asked, batches_S)
    except RecipeError as error:
        yield Seen(**about, observer=PART, who="", refused=str(error))
        return
    campaign = _campaign(found.model, found.x)

    def looked(view: View, observer: str, who: str, sites: Sequence[int] = (0,)) -> Seen:
        truth = _truth(found, [batches_S[site] for site in sites])
        findings = campaign.on(view, truth, matching=matching)
        told = {"findings": findings, "texts": found.texts_of(findings)}
        return Seen(**about, observer=observer, who=who, **told)

    ways = ways_of(sent_S[0])
    observers = Observers(sent_S, dict(found.model.named_parameters()), asked.changed_by)
    yield looked(observers.part(0), PART, _WHO.get(frozenset(ways), _OPEN))
    if ways == {Way.GATHERED}:
        return
    others = [n for n in range(SITES) if n != READER]
    if Way.OWNED in ways:
        pairs = [(owner, (owner + 1) % SITES) for owner in range(SITES)]
        who = "the owner of each layer, of that layer"
        seen = [looked(observers.by(o, of), SITE, who, [of]) for o, of in pairs]
        yield max(seen, key=lambda one: one.worst.share if one.worst else 0.0)
    elif ways != {Way.SUMMED}:
        yield looked(observers.by(READER, 0), SITE, "each other of three sites")
    yield looked(observers.sum_of_others(READER), SUM, "each other of three sites", others)
    if ways == {Way.SUMMED}:
        yield looked(masked(observers.part(0)), MASKED, "a hub with blind=True")


def _of_file(question: Question, path: Path, progress: Callable[[str], None]) -> Iterator[Seen]:
    """Yields what came back of each step in a file."""
    found = recorded(path, question.model, question.positions, CANARIES, question.data_dir)
    if found.local_steps is not None and question.lr is None:
        raise RecipeError(
            f"--recorded {path} is of og.LocalSteps, whose messages are changes of the weights: "
            f"say by --lr the learning rate of the steps before them"
        )
    changed_by = None if found.local_steps is None else found.local_steps * (question.lr or 1.0)
    for step in found.steps:
        progress(f"step {step.number}")
        sent = [replace(one, scale=one.scale / (changed_by or 1.0)) for one in step.sent]
        try:
            view = view_of(sent, dict(step.model.named_parameters()), changed_by=changed_by)
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
        ) as error:
            raise RecipeError(
                f"--recorded {path}: messages of step {step.number} do not fit the model, or are "
                f"damaged: {error!r}"
            ) from error
        campaign = _campaign(step.model, step.truth.x)
        about = {"method": f"{found.method}, step {step.number}", "rows": len(step.truth.x)}
        told: list[tuple[View, str, str]] = [
            (view, PART, _WHO.get(frozenset(ways_of(sent)), _OPEN))
        ]
        if is_summed(sent):
            told.append((masked(view), MASKED, "a hub with blind=True"))
        for seen, observer, who in told:
            findings = campaign.on(seen, step.truth, matching=question.matching)
            texts = found.subject.texts_of(findings)
            more = {"source": "recorded rows", "findings": findings, "texts": texts}
            yield Seen(**about, observer=observer, who=who, **more)


def _campaign(model: nn.Module, x: Tensor) -> Campaign:
    return Campaign(copy.deepcopy(model).train(), places_of(copy.deepcopy(model), x[:2]))


def _batches(found: Subjected, asked: Asked, rows: int, site: int) -> Batches:
    size = rows * asked.steps
    x, y = (t[site * size : (site + 1) * size] for t in (found.x, found.y))
    return [*zip(x.split(rows), y.split(rows), strict=True)]


def _truth(found: Subjected, batches_S: Sequence[Batches]) -> Truth:
    pairs = [pair for batches in batches_S for pair in batches]
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    outside = found.x[-CANARIES:], found.y[-CANARIES:]
    return Truth(x=x, y=y, outside=outside, vocabulary=found.vocabulary)
