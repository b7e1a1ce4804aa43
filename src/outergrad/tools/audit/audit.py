"""The audit: every method at every batch size, by what its messages tell each observer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outergrad.launch.errors import RecipeError
from outergrad.tools.audit.campaign import Campaign, Finding, Truth
from outergrad.tools.audit.observed import Asked, Batches, observed
from outergrad.tools.audit.places import places_of
from outergrad.tools.audit.view import View, is_summed, masked, summed, view_of
from outergrad.tools.plan.subject import imported, known, subject

SITES = 3
"""Two that are looked at, and one that looks: with less, a sum is the other site's part."""
CANARIES = 32
"""Rows beside the batches, which no attack may find in them."""

PART, SUM, MASKED = "a part", "a sum of 2", "masked"


@dataclass(frozen=True, kw_only=True)
class Question:
    """An audit to be made.

    Attributes:
        model: Name of a workload, or ``module:factory``.
        methods: Names of methods, with an ε behind `@` where they are private.
        rows: Batch sizes.
        positions: Length to which texts are cut; None for their own.
        matching: Whether to match inputs by optimisation, which takes minutes.
    """

    model: str
    methods: Sequence[str]
    rows: Sequence[int] = (1, 8, 32)
    positions: int | None = None
    matching: bool = False

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            RecipeError: One of them is too small.
        """
        if not self.rows or min(self.rows) < 1:
            raise RecipeError(f"--rows must be numbers of 1 and more, not {list(self.rows)}")
        if self.positions is not None and self.positions < 1:
            raise RecipeError(f"--positions must be 1 or more, not {self.positions}")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Findings of all attacks in what one kind of observer sees.

    Attributes:
        method: Name of the method.
        rows: Batch size of a site.
        observer: What is seen: `PART`, `SUM` or `MASKED`.
        who: Who sees that, in words.
        findings: Of every attack that fits the model.
        refused: Why the method does not go with the model; empty if it does.
    """

    method: str
    rows: int
    observer: str
    who: str
    findings: Sequence[Finding] = ()
    refused: str = ""

    @property
    def worst(self) -> Finding | None:
        """The attack that found most; None without one."""
        return max(self.findings, key=lambda one: one.share, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Returns it in JSON types, without pictures."""
        told = {k: getattr(self, k) for k in ("method", "rows", "observer", "who", "refused")}
        return told | {"findings": [{**vars(one), "pictures": None} for one in self.findings]}


@dataclass(frozen=True, kw_only=True)
class Subjected:
    """A model with rows to audit it by.

    Attributes:
        model: The model.
        x: Inputs, or ids.
        y: Labels.
    """

    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens that the first embedding knows, if inputs are ids."""
        if self.x.is_floating_point():
            return None
        tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
        return tables[0].num_embeddings if tables else None


def subjected(name: str, rows: int, positions: int | None = None) -> Subjected:
    """Builds a model, and rows for it.

    Args:
        name: A workload, or ``module:factory``, which gets a number of rows and returns (model,
            inputs, labels), whose loss is the cross-entropy.
        rows: Number of rows.
        positions: Length to which texts are cut.

    Raises:
        RecipeError: There is no such model, or it cannot be audited.
    """
    if ":" in name and name not in known():
        torch.manual_seed(0)
        made = imported("--model", name)(rows)
        if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module)):
            raise RecipeError(f"--model {name} must return (model, inputs, labels) for an audit")
        model, x, y = made
    else:
        found = subject(name, rows)
        if found.batch is None:
            raise RecipeError(f"--model {name} has no labels: an audit needs them")
        model, (x, y) = found.model, found.batch
    if positions is not None and x.ndim == 2 and not x.is_floating_point():
        x, y = x[:, :positions], y[:, :positions] if y.ndim == 2 else y
    return Subjected(model=model, x=x, y=y)


def audit(question: Question, progress: Callable[[str], None] = lambda told: None) -> list[Seen]:
    """Runs every method at every batch size in one process, and attacks what it sends.

    Args:
        question: What to audit.
        progress: Told of each method and batch size before it begins.

    Raises:
        RecipeError: There is no such method or model.
    """
    asked = [Asked.of(name) for name in question.methods]
    most = max(question.rows) * max(one.steps for one in asked) * SITES
    found = subjected(question.model, most + CANARIES, question.positions)
    seen: list[Seen] = []
    for one in asked:
        for rows in question.rows:
            progress(f"{one.name}, {rows} {'row' if rows == 1 else 'rows'}")
            seen += _audited(found, one, rows, matching=question.matching)
    return seen


def _audited(found: Subjected, asked: Asked, rows: int, *, matching: bool) -> Iterator[Seen]:
    batches_S = [_batches(found, asked, rows, site) for site in range(SITES)]
    about = {"method": asked.name, "rows": rows}
    try:
        sent_S = observed(found.model, asked, batches_S)
    except RecipeError as error:
        yield Seen(**about, observer=PART, who="", refused=str(error))
        return
    params = dict(found.model.named_parameters())
    views = [view_of(sent, params, changed_by=asked.changed_by) for sent in sent_S[: SITES - 1]]
    campaign = Campaign(
        copy.deepcopy(found.model).train(), places_of(copy.deepcopy(found.model), found.x[:2])
    )

    def looked(view: View, sites: Sequence[int]) -> list[Finding]:
        truth = _truth(found, [batches_S[site] for site in sites])
        return campaign.on(view, truth, matching=matching)

    adds_up = is_summed(sent_S[0])
    who = "who adds up; the other of two sites" if adds_up else "every other site"
    yield Seen(**about, observer=PART, who=who, findings=looked(views[0], [0]))
    if adds_up:
        both = looked(summed(views), range(SITES - 1))
        yield Seen(**about, observer=SUM, who="each other of three sites", findings=both)
        hidden = looked(masked(views[0]), [0])
        yield Seen(**about, observer=MASKED, who="a hub with blind=True", findings=hidden)


def _batches(found: Subjected, asked: Asked, rows: int, site: int) -> Batches:
    size = rows * asked.steps
    x, y = (t[site * size : (site + 1) * size] for t in (found.x, found.y))
    return [*zip(x.split(rows), y.split(rows), strict=True)]


def _truth(found: Subjected, batches_S: Sequence[Batches]) -> Truth:
    pairs = [pair for batches in batches_S for pair in batches]
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    outside = found.x[-CANARIES:], found.y[-CANARIES:]
    return Truth(x=x, y=y, outside=outside, vocabulary=found.vocabulary)
