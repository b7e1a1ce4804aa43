"""The kinds of tasks, by name."""

from outergrad.reproduce.iterations import ITERATIONS
from outergrad.reproduce.sites import SITES
from outergrad.reproduce.task import Kind
from outergrad.reproduce.timing import TIMING
from outergrad.reproduce.training import TRAINING

KINDS: dict[str, Kind] = {
    "training": TRAINING,
    "timing": TIMING,
    "sites": SITES,
    "iterations": ITERATIONS,
}
