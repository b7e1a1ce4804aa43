"""Tasks of kind "autospec": do the spectra of groups of samples differ, and what do they tell."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

import outergrad as og
from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import Stop, simulate
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.task import Context, at_least
from outergrad_lab.models.small import mlp

WIDTHS = {"mnist": (784, 128, 64, 10), "spoken-digits": (13, 64, 10)}
"""Widths of the network: an MLP, or a GRU and a linear layer."""
BY = ("class", "speaker", "class, drawn", "speaker, drawn", "site")
"""Groups: labels of the rows, the same labels drawn anew, so that they mean nothing, or sites."""
_KINDS = ("gradient", "activations", "deltas")

Course = Mapping[str, list[float]]
"""Values of each group over the recorded steps."""


@dataclass(frozen=True, kw_only=True)
class AutospecWork:
    """Trains at several sites, and records singular values by group.

    Attributes:
        data: One of `WIDTHS`.
        by: One of `BY`.
        wrong: Percent of the labels of the last site that are drawn anew.
        steps: Steps of Adam.
        every: Steps from one recorded to the next.
        sites: Number of sites.
        batch_size: Rows per site and step.
        lr: Rate of Adam.
        seed: Seed of weights, batches and labels that are drawn.
    """

    data: str
    by: str
    wrong: int = at_least(0, 0)
    steps: int = at_least(2)
    every: int = at_least(1, 5)
    sites: int = at_least(1, 2)
    batch_size: int = at_least(1, 64)
    lr: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses names that are not known, and speakers of images."""
        for name, value, known in (("data", self.data, WIDTHS), ("by", self.by, BY)):
            if value not in known:
                raise RecipeError(f"{name} must be one of {'; '.join(known)}, not {value!r}")
        if self.by.startswith("speaker") and self.data != "spoken-digits":
            raise RecipeError(f"by: {self.by} needs data: spoken-digits, not {self.data}")

    def run(self, context: Context) -> dict[str, Any]:
        """Trains, in one step of progress per step of training."""
        data = load(self.data, context.data_dir)
        context.steps(self.steps)
        torch.manual_seed(self.seed)
        model = network(self.data)
        sites = self._rows_of_sites(data)
        labels = self._labels(data)

        def work(group: dist.ProcessGroup, stop: Stop) -> tuple[_Heard, Course]:
            advance = context.advance if group.rank() == 0 else lambda: None
            return self._trained(replicas[group.rank()], sites, labels, group, stop, advance)

        replicas = [copy.deepcopy(model) for _ in range(self.sites)]
        found = simulate(work, self.sites)
        errors = self._errors(replicas[0], data)
        courses = dict(_joined([heard.values for heard, _ in found]))
        courses["all", "loss"] = _together([losses for _, losses in found])
        rows = [
            {"layer": layer, "way": kind, **self._told(course, errors)}
            for (layer, kind), course in courses.items()
        ]
        return {"rows": rows, "errors": errors}

    def _rows_of_sites(self, data: Dataset) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns inputs, labels and numbers of the rows of each site."""
        drawn = torch.randperm(len(data.x_train), generator=self._generator(0))
        found = []
        for rank in range(self.sites):
            rows = drawn[rank :: self.sites]
            found.append((data.x_train[rows], data.y_train[rows].clone(), rows))
        y = found[-1][1]
        count = len(y) * self.wrong // 100
        y[:count] = torch.randint(data.classes, (count,), generator=self._generator(1))
        return found

    def _labels(self, data: Dataset) -> Tensor | None:
        """Returns the group of each training row; None where sites are groups."""
        if self.by == "site":
            return None
        labels = data.y_train if self.by.startswith("class") else data.groups_train
        assert labels is not None
        if self.by.endswith("drawn"):
            labels = labels[torch.randperm(len(labels), generator=self._generator(2))]
        return labels

    def _generator(self, what: int) -> torch.Generator:
        return torch.Generator().manual_seed(10 * self.seed + what)

    def _trained(
        self,
        model: nn.Module,
        sites: list[tuple[Tensor, Tensor, Tensor]],
        labels: Tensor | None,
        group: dist.ProcessGroup,
        stop: Stop,
        advance: Any,
    ) -> tuple[_Heard, Course]:
        heard, losses = _Heard(self.every), defaultdict(list)
        x, y, rows = sites[group.rank()]
        session = og.distribute(model, og.DAD(always=True), group=group, recorder=heard)
        optimizer = Adam(model.parameters(), lr=self.lr)
        generator = self._generator(3 + group.rank())
        for step in stop.checked(range(self.steps)):
            picked = torch.randint(len(x), (self.batch_size,), generator=generator)
            names = [f"site {group.rank()}"] * self.batch_size
            if labels is not None:
                names = [str(int(label)) for label in labels[rows[picked]]]
                session.groups(names)
            optimizer.zero_grad()
            each = cross_entropy(model(x[picked]), y[picked], reduction="none")
            each.mean().backward()
            optimizer.step()
            if step % self.every == 0:
                for name, loss in _means(names, each.detach().tolist()).items():
                    losses[name].append(loss)
            advance()
        session.detach()
        return heard, losses

    @torch.no_grad()
    def _errors(self, model: nn.Module, data: Dataset) -> dict[str, float]:
        """Returns the share of each class that is wrong in the test; empty for other groups."""
        if self.by != "class":
            return {}
        wrong = model(data.x_test).argmax(1) != data.y_test
        means = _means([str(int(y)) for y in data.y_test], wrong.float().tolist())
        return dict(means)

    def _told(self, course: Course, errors: Mapping[str, float]) -> dict[str, float]:
        """Returns how far groups are apart, and what that tells."""
        whole = {name: fmean(values) for name, values in course.items()}
        found = {"spread": pstdev(whole.values()) / fmean(whole.values())}
        if self.wrong:
            odd = whole.pop(f"site {self.sites - 1}")
            found["odd_ratio"] = odd / fmean(whole.values())
        if errors:
            late = {name: fmean(values[len(values) // 2 :]) for name, values in course.items()}
            names = sorted(errors.keys() & late.keys())
            pairs = [[of[name] for name in names] for of in (late, errors)]
            found["error_correlation"] = _rank_correlation(*pairs)
        return found


class _Heard:
    """Recorder of the largest singular value of each layer, kind and group.

    Attributes:
        values: By layer and kind, then by group, one per recorded step that has the group.
    """

    groups = True

    def __init__(self, every: int) -> None:
        self.every = every
        self.values: dict[tuple[str, str], dict[str, list[float]]] = {}

    def record(self, event: og.events.Event) -> None:
        if not isinstance(event, og.events.Layer) or event.group_rows is None:
            return
        for kind in _KINDS:
            course = self.values.setdefault((event.layer, kind), defaultdict(list))
            for name, values in getattr(event, f"group_{kind}").items():
                course[name].append(values[0])


def network(data: str) -> nn.Module:
    """Returns the network of a data set."""
    widths = WIDTHS[data]
    return mlp(widths) if data == "mnist" else _Recurrent(*widths)


class _Recurrent(nn.Module):
    """A GRU, and a linear layer on its mean over time."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0].mean(dim=1))


def _means(names: list[str], values: list[float]) -> dict[str, float]:
    found = defaultdict(list)
    for name, value in zip(names, values, strict=True):
        found[name].append(value)
    return {name: fmean(of) for name, of in found.items()}


def _together(courses: list[Course]) -> Course:
    """Returns the values of several sites, one site's behind the other's at each step."""
    names = dict.fromkeys(name for course in courses for name in course)
    of = {name: [course[name] for course in courses if name in course] for name in names}
    most = {name: max(map(len, lists)) for name, lists in of.items()}
    return {
        name: [one[k] for k in range(most[name]) for one in lists if k < len(one)]
        for name, lists in of.items()
    }


def _joined(
    sites: list[dict[tuple[str, str], dict[str, list[float]]]],
) -> Iterator[tuple[tuple[str, str], Course]]:
    for key in sites[0]:
        yield key, _together([site[key] for site in sites])


def _rank_correlation(x: list[float], y: list[float]) -> float:
    """Returns Spearman's coefficient; ties have the mean of their ranks."""
    ranks = torch.stack([_ranks(torch.tensor(values)) for values in (x, y)])
    return torch.corrcoef(ranks)[0, 1].item()


def _ranks(values_N: Tensor) -> Tensor:
    below = (values_N[None] < values_N[:, None]).sum(dim=1)
    same = (values_N[None] == values_N[:, None]).sum(dim=1)
    return below + (same - 1) / 2
