"""The kinds of tasks, by name."""

from outergrad.reproduce.task import Kind
from outergrad.reproduce.training import TRAINING

KINDS: dict[str, Kind] = {"training": TRAINING}
