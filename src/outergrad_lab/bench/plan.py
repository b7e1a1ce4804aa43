"""Settings of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from outergrad.launch.errors import RecipeError
from outergrad.tools.plan.subject import check_subject
from outergrad_lab.peers.named import attach_of
from outergrad_lab.training.job import OPTIMIZERS, require
from outergrad_lab.workloads import WORKLOADS, Workload

COMPARED = ("ddp", "powersgd-4", "dense", "dad", "rank-dad-4", "auto")
"""Methods compared by default: PyTorch's own, exact and approximate ones, and the default."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One measurement, the same on every link.

    Attributes:
        workload: A key of `WORKLOADS`, or ``module:factory``, as of `outergrad plan`.
        rows: Rows of a batch on one site; the workload's own if None.
        methods: Methods to compare: names that `attach_of` knows.
        sites: Number of sites.
        steps: Timed steps in a block.
        rounds: Blocks of each method, at most.
        warmup: Untimed steps before the first block of a method.
        seconds: Seconds on one link after which a method gets no further round.
        threads: PyTorch's, at each site.
        optimizer: A key of `OPTIMIZERS`; if None, SGD, which is cheap, and Adam to a loss.
        until_loss: Test loss until which real data is trained on, instead of timing steps.
        check_every: Steps between two checks of the test loss.
        max_steps: Steps after which a method that has not reached the loss is abandoned.
        data_dir: Folder of the data sets.
    """

    workload: str = "mlp"
    rows: int | None = None
    methods: tuple[str, ...] = COMPARED
    sites: int = 2
    steps: int = 5
    rounds: int = 5
    warmup: int = 3
    seconds: float = 120
    threads: int = 1
    optimizer: str | None = None
    until_loss: float | None = None
    check_every: int = 20
    max_steps: int = 5000
    data_dir: Path = Path("data")

    def __post_init__(self) -> None:
        check_subject(self.workload, self.rows)
        for method in self.methods:
            attach_of(method, "--methods")
        if "pooled" in self.methods:
            raise RecipeError("--methods must not be pooled: pooled exchanges nothing")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise RecipeError("--methods must name each method once, and at least one")
        known = self.optimizer is None or self.optimizer in OPTIMIZERS
        require(known, "optimizer", f"one of {', '.join(OPTIMIZERS)}", self, OPTIMIZERS)
        require(self.sites >= 2, "sites", "2 or more", self)
        for name in ("steps", "rounds", "threads", "check_every", "max_steps"):
            require(getattr(self, name) >= 1, name, "1 or more", self)
        require(self.warmup >= 3, "warmup", "3 or more: PowerSGD starts at the third step", self)
        require(0 < self.seconds < inf, "seconds", "above 0 and finite", self)
        if self.until_loss is not None:
            require(0 < self.until_loss < inf, "until_loss", "above 0 and finite", self)
            if self.recipe is None or not self.recipe.data:
                raise RecipeError(f"--until-loss needs real data; {self.workload} has none")

    @property
    def recipe(self) -> Workload | None:
        """Workload of the measurement; None for a model of the user's own."""
        return WORKLOADS.get(self.workload)
