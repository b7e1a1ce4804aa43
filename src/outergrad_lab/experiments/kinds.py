"""Kinds of tasks, by name."""

from collections.abc import Callable
from functools import partial

from outergrad_lab.experiments.iterations import IterationsWork
from outergrad_lab.experiments.selection import SelectionWork
from outergrad_lab.experiments.settings import read
from outergrad_lab.experiments.sites import SitesWork
from outergrad_lab.experiments.star import StarWork
from outergrad_lab.experiments.task import Settings, Work
from outergrad_lab.experiments.timing import TimingWork
from outergrad_lab.experiments.training import TrainingWork

KINDS: dict[str, Callable[[Settings], Work]] = {
    "training": TrainingWork.of,
    "timing": partial(read, TimingWork),
    "sites": partial(read, SitesWork),
    "star": StarWork.of,
    "iterations": partial(read, IterationsWork),
    "selection": partial(read, SelectionWork),
}
"""Functions that make the work of a task from its settings."""

TRAINED = ("training", "star")
"""Kinds that have the settings of a training."""
