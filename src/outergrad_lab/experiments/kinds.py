"""The kinds of tasks, by name."""

from outergrad_lab.experiments.iterations import ITERATIONS
from outergrad_lab.experiments.sites import SITES
from outergrad_lab.experiments.task import Kind
from outergrad_lab.experiments.timing import TIMING
from outergrad_lab.experiments.training import TRAINING

KINDS: dict[str, Kind] = {
    "training": TRAINING,
    "timing": TIMING,
    "sites": SITES,
    "iterations": ITERATIONS,
}
