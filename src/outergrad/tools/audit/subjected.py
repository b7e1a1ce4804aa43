"""Subject of an audit: a model with rows, from a workload or from the user's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from outergrad.launch.errors import RecipeError
from outergrad.tools.audit.findings import Finding
from outergrad.tools.plan.subject import RealRows, Subject, imported, known, subject

MADE_UP = "made-up rows"


@dataclass(frozen=True, kw_only=True)
class Subjected:
    """A model with rows to audit it by.

    Attributes:
        model: The model.
        x: Inputs, or ids.
        y: Labels.
        source: Where the rows are from, in words.
        decode: Makes a text of ids; None where it is not known how.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    source: str = ""
    decode: Callable[[Sequence[int]], str] | None = None

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens that the first embedding knows, if inputs are ids."""
        if self.x.is_floating_point():
            return None
        tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
        return tables[0].num_embeddings if tables else None

    def texts_of(self, findings: Sequence[Finding]) -> list[str]:
        """Returns the texts that came back, where it is known how to decode them."""
        if self.decode is None:
            return []
        return [self.decode(text.tolist()) for one in findings for text in one.texts]


def subjected(
    name: str, rows: int, positions: int | None = None, data_dir: Path | None = None
) -> Subjected:
    """Builds a model, and rows for it.

    Args:
        name: A workload, or ``module:factory``, which gets a number of rows and returns (model,
            inputs, labels), whose loss is the cross-entropy.
        rows: Number of rows.
        positions: Length to which texts are cut.
        data_dir: Folder of the data sets; where that of a workload is not there, or None is
            given, its rows are made up.

    Raises:
        RecipeError: There is no such model, or it cannot be audited.
    """
    source, decode = "rows of its own", None
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
        real, source = _real(found, rows, data_dir)
        if real is not None:
            x, y, decode = real.x, real.y, real.decode
    if positions is not None and x.ndim == 2 and not x.is_floating_point():
        x, y = x[:, :positions], y[:, :positions] if y.ndim == 2 else y
    return Subjected(model=model, x=x, y=y, source=source, decode=decode)


def _real(found: Subject, rows: int, data_dir: Path | None) -> tuple[RealRows | None, str]:
    """Returns real rows, and where rows are from, in words."""
    if found.real is None or data_dir is None:
        return None, MADE_UP
    try:
        real = found.real(data_dir, rows)
    except RecipeError as error:
        return None, f"{MADE_UP} ({error})"
    if len(real.x) < rows:
        return None, f"{MADE_UP} ({real.name} has {len(real.x)} rows, and {rows} are needed)"
    return real, f"rows of {real.name}"
