"""Privacy of a planned training: the noise that an ε takes, and the ε of each observer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf, isinf
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from outergrad.core.packages import missing
from outergrad.core.transport import Sums
from outergrad.launch.errors import RecipeError
from outergrad.private import Ledger, Poisson, Release, noise_for
from outergrad.private.observers import Observer

_OBSERVERS: dict[str, tuple[Observer, Sums]] = {
    "whoever gets the model": ("model", "masked"),
    "another site, sums masked or by a trusted hub": ("site", "masked"),
    "another site, or a hub, that sees messages": ("site", "open"),
}


@dataclass(frozen=True, kw_only=True)
class PrivacyQuestion:
    """Budget of privacy and length of a training.

    Attributes:
        epsilon: ε against whoever gets the model.
        delta: δ.
        epochs: Epochs, in each of which a row comes up once on average.
        samples: N, rows of each site.

    Raises:
        RecipeError: A value is missing or not allowed, or dp-accounting is not installed.
    """

    epsilon: float
    delta: float
    epochs: float
    samples: int

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 50:
            raise RecipeError(f"--epsilon must be above 0 and at most 50, not {self.epsilon:g}")
        if not 0 < self.delta < 1:
            raise RecipeError(f"--delta must be between 0 and 1, not {self.delta:g}")
        if not 0 < self.epochs < inf:
            raise RecipeError(f"--epochs must be above 0, not {self.epochs:g}")
        if self.samples < 1:
            raise RecipeError(f"--samples must be 1 or more, not {self.samples}")
        if told := missing("dp_accounting"):
            raise RecipeError(f"--epsilon: {told}")

    @classmethod
    def of(cls, **options: Any) -> PrivacyQuestion | None:
        """Returns the question, or None if none of its options was given."""
        lacking = [f"--{name}" for name, value in options.items() if value is None]
        if len(lacking) == len(options):
            return None
        if lacking:
            raise RecipeError(f"a plan of privacy needs {' and '.join(lacking)}, too")
        return cls(**options)


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """The answer.

    Attributes:
        question: The question.
        sites: S.
        rate: q, probability of each row to be in a batch.
        steps: Steps of the training.
        noise: σ, standard deviation of the noise in the sum over all sites, over the clip.
        epsilons: ε by PLD and by RDP, by observer.
    """

    question: PrivacyQuestion
    sites: int
    rate: float
    steps: int
    noise: float
    epsilons: dict[str, tuple[float, float]]

    @property
    def sentence(self) -> str:
        """The noise that it takes, in words."""
        asked = self.question
        return (
            f"ε = {asked.epsilon:g} at δ = {asked.delta:g} against whoever gets the model takes "
            f"noise of {self.noise:.3f} clips in the sum of gradients, "
            f"{self.noise / self.sites**0.5:.3f} from each of {self.sites} sites: "
            f"{asked.epochs:g} epochs are {self.steps:,} steps of Poisson batches, with each of a "
            f"site's {asked.samples:,} rows in one with probability {self.rate:.4g}. "
            f"Bytes and seconds above are without noise: with og.Private gradients travel dense "
            f'or in sums, and not by every method (docs/private.md, "Which method").'
        )

    @property
    def table(self) -> Table:
        """A row per observer."""
        table = Table(title="ε against", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        table.pad_edge, table.padding = False, (0, 1, 0, 0)
        table.add_column("observer")
        for accountant in ("by PLD", "by RDP"):
            table.add_column(accountant, justify="right", no_wrap=True)
        for observer, bounds in self.epsilons.items():
            table.add_row(observer, *("over 100" if isinf(e) else f"{e:.2f}" for e in bounds))
        return table

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan in JSON types; an ε that was not computed is None."""
        found = {
            observer: {"pld": None if isinf(pld) else pld, "rdp": None if isinf(rdp) else rdp}
            for observer, (pld, rdp) in self.epsilons.items()
        }
        return {
            **asdict(self.question),
            "rate": self.rate,
            "steps": self.steps,
            "noise": self.noise,
            "epsilons": found,
        }


def privacy_plan(question: PrivacyQuestion, *, rows: int, sites: int) -> PrivacyPlan:
    """Finds the noise, and what it means to each observer.

    Args:
        question: The question.
        rows: Rows of a batch on one site, on average.
        sites: Number of sites.

    Raises:
        RecipeError: A batch has more rows than a site.
    """
    if rows > question.samples:
        raise RecipeError(
            f"--samples {question.samples} is less than the {rows} rows of a batch: pass --rows"
        )
    rate = rows / question.samples
    steps = max(1, round(question.epochs / rate))
    noise = noise_for(question.epsilon, question.delta, rate, steps)

    def epsilons(observer: Observer, sums: Sums) -> tuple[float, float]:
        ledger = Ledger(question.delta)
        ledger.record(Release(noise, Poisson(rate), sites, sums), steps)
        return ledger.epsilon(observer), ledger.epsilon(observer, accountant="rdp")

    found = {told: epsilons(*who) for told, who in _OBSERVERS.items()}
    return PrivacyPlan(
        question=question, sites=sites, rate=rate, steps=steps, noise=noise, epsilons=found
    )
