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
from outergrad.private import CyclicPoisson, Ledger, Poisson, Release, noise_for
from outergrad.private.correlated import noise_in_sums
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
        bands: b of `og.Private(bands=b)`: batches are drawn of so many parts in turn.

    Raises:
        RecipeError: A value is missing or not allowed, or dp-accounting is not installed.
    """

    epsilon: float
    delta: float
    epochs: float
    samples: int
    bands: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 50:
            raise RecipeError(f"--epsilon must be above 0 and at most 50, not {self.epsilon:g}")
        if not 0 < self.delta < 1:
            raise RecipeError(f"--delta must be between 0 and 1, not {self.delta:g}")
        if not 0 < self.epochs < inf:
            raise RecipeError(f"--epochs must be above 0, not {self.epochs:g}")
        if self.samples < 1:
            raise RecipeError(f"--samples must be 1 or more, not {self.samples}")
        if self.bands < 1:
            raise RecipeError(f"--bands must be 1 or more, not {self.bands}")
        if told := missing("dp_accounting"):
            raise RecipeError(f"--epsilon: {told}")

    @classmethod
    def of(cls, *, bands: int | None = None, **options: Any) -> PrivacyQuestion | None:
        """Returns the question, or None if none of its options was given."""
        lacking = [f"--{name}" for name, value in options.items() if value is None]
        if len(lacking) == len(options) and bands is None:
            return None
        if lacking:
            raise RecipeError(f"a plan of privacy needs {' and '.join(lacking)}, too")
        return cls(**options, bands=1 if bands is None else bands)

    def check_rows(self, rows: int) -> None:
        """Checks the rows of a batch on one site, on average.

        Raises:
            RecipeError: A batch has more rows than a site, or than a part of them.
        """
        if rows > self.samples:
            raise RecipeError(
                f"--samples {self.samples} is less than the {rows} rows of a batch: pass --rows"
            )
        if rows * self.bands > self.samples:
            raise RecipeError(
                f"--bands {self.bands}: a batch has rows of one of {self.bands} parts of --samples "
                f"{self.samples}, which is less than its {rows} rows: pass --bands "
                f"{self.samples // rows} at most, or fewer --rows"
            )


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """The answer.

    Attributes:
        question: The question.
        sites: S.
        rate: q, probability of each row to be in a batch.
        steps: Steps of the training.
        noise: σ, standard deviation of the noise in the sum over all sites, over the clip.
        in_sums: noise in the sum of the first t steps, as root mean square over t, over the clip;
            and what it is without bands, at the same ε.
        epsilons: ε by PLD and by RDP, by observer.
    """

    question: PrivacyQuestion
    sites: int
    rate: float
    steps: int
    noise: float
    in_sums: tuple[float, float]
    epsilons: dict[str, tuple[float, float]]

    @property
    def sentence(self) -> str:
        """The noise that it takes, in words."""
        asked = self.question
        if asked.bands == 1:
            batches, of_sums = "Poisson batches", ""
        else:
            batches = f"Poisson batches of {asked.bands} parts in turn"
            of_sums = (
                f"Sums of steps, which an optimizer applies, have noise of "
                f"{self.in_sums[0]:.1f} clips (root mean square over the training), and "
                f"{self.in_sums[1]:.1f} with 1 band at this ε. "
            )
        return (
            f"ε = {asked.epsilon:g} at δ = {asked.delta:g} against whoever gets the model takes "
            f"noise of {self.noise:.3f} clips in the sum of gradients, "
            f"{self.noise / self.sites**0.5:.3f} from each of {self.sites} sites: "
            f"{asked.epochs:g} epochs are {self.steps:,} steps of {batches}, with each of a "
            f"site's {asked.samples:,} rows in one with probability {self.rate:.4g}"
            f"{' on average' if asked.bands > 1 else ''}. {of_sums}"
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
            "noise_in_sums": self.in_sums[0],
            "noise_in_sums_of_1_band": self.in_sums[1],
            "epsilons": found,
        }


def privacy_plan(question: PrivacyQuestion, *, rows: int, sites: int) -> PrivacyPlan:
    """Finds the noise, and what it means to each observer.

    Args:
        question: The question.
        rows: Rows of a batch on one site, on average.
        sites: Number of sites.

    Raises:
        RecipeError: A batch has more rows than a site, or than a part of them.
    """
    question.check_rows(rows)
    bands, rate = question.bands, rows / question.samples
    steps = max(1, round(question.epochs / rate))
    sampling = Poisson(rate) if bands == 1 else CyclicPoisson(rate, bands)
    asked = question.epsilon, question.delta
    noise = noise_for(*asked, sampling, steps)
    of_one = noise if bands == 1 else noise_for(*asked, rate, steps)
    in_sums = noise * noise_in_sums(bands, steps), of_one * noise_in_sums(1, steps)

    def epsilons(observer: Observer, sums: Sums) -> tuple[float, float]:
        ledger, sequence = Ledger(question.delta), "" if bands == 1 else "planned"
        release = Release(noise, sampling, sites, sums, bands=bands, sequence=sequence)
        ledger.record(release, steps)
        return ledger.epsilon(observer), ledger.epsilon(observer, accountant="rdp")

    found = {told: epsilons(*who) for told, who in _OBSERVERS.items()}
    about = {"sites": sites, "rate": rate, "steps": steps, "noise": noise}
    return PrivacyPlan(question=question, **about, in_sums=in_sums, epsilons=found)
