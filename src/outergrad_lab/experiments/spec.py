"""Experiments as their YAML describes them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.kinds import KINDS, TRAINED
from outergrad_lab.experiments.sweeps import number_due
from outergrad_lab.experiments.task import Settings, Task, read, require_known

IN_PACKAGE = Path(__file__).with_name("experiments")
IN_REPOSITORY = Path(__file__).parents[3] / "experiments"

LISTS = ("methods", "widths", "local")
"""Settings that are lists by nature; other lists mean one task for each of their values."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment at one size.

    Attributes:
        name: Name of the experiment.
        title: Title in a few words.
        shows: Expected finding.
        claim: Claim of the paper that it tests.
        minutes: Minutes that the small size took on 2 cores.
        full: Whether it has the paper's size, not the small one.
        tasks: Tasks to run, each once.
        tables: Tables to write, as in the YAML.
        figures: Figures to draw, as in the YAML.
        sweep: Setting of which each method's best value is searched; see `sweeps`.
        options: Options of the command that runs this part of the experiment.
    """

    name: str
    title: str
    shows: str
    claim: str
    minutes: float
    full: bool
    tasks: tuple[Task, ...]
    tables: tuple[Mapping[str, Any], ...]
    figures: tuple[Mapping[str, Any], ...]
    sweep: str = ""
    options: str = ""

    @property
    def runs(self) -> int:
        """Number of tasks that will have run in the end."""
        return number_due(self.tasks, self.sweep)

    @property
    def size(self) -> str:
        """Small or full."""
        return "full" if self.full else "small"

    @property
    def command(self) -> str:
        """Command that runs it."""
        return f"outergrad reproduce {self.name}{' --full' if self.full else ''}{self.options}"


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Settings of one size alone."""

    small: dict[str, Any] = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Entry(_Sizes):
    """Parts of an entry of `runs` besides settings."""

    kind: str = "training"


@dataclass(frozen=True, kw_only=True)
class _Parts(_Sizes):
    """Parts of a YAML; sizes, `common` and `workloads` apply to all trainings.

    A workload has a name, settings and sizes of its own, and an entry of `runs` may name some of
    them in `workloads`.
    """

    title: str
    shows: str
    claim: str
    minutes: float
    sweep: str = ""
    common: dict[str, Any] = field(default_factory=dict)
    workloads: dict[str, Any] = field(default_factory=dict)
    runs: tuple[dict[str, Any], ...] = ()
    tables: tuple[dict[str, Any], ...] = ()
    figures: tuple[dict[str, Any], ...] = ()


def names() -> list[str]:
    """Returns the names of all experiments."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def experiment(name: str, *, full: bool = False) -> Experiment:
    """Reads an experiment.

    Args:
        name: One of `names`, or a path to a YAML of one's own.
        full: Whether to use the paper's size.

    Raises:
        RecipeError: There is no such experiment, or its YAML has a mistake, which is named.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else _folder() / f"{name}.yaml"
    if not path.is_file():
        raise RecipeError(f"no experiment {name!r}: there are {', '.join(names())}")
    try:
        return _read(path, full=full)
    except RecipeError as error:
        raise RecipeError(f"{path.name}: {error}") from None


def _folder() -> Path:
    return IN_PACKAGE if IN_PACKAGE.is_dir() else IN_REPOSITORY


def _read(path: Path, *, full: bool) -> Experiment:
    given = read(_Parts, _parsed(path), "part")
    tasks = tuple(dict.fromkeys(_tasks(given, full=full)))
    if not tasks:
        raise RecipeError("runs: there are none")
    for task in tasks:
        KINDS[task.kind](task.settings)
    _require_shown("tables", given.tables, ("name", "rows", "value"))
    _require_shown("figures", given.figures, ("name", "x", "y", "lines"))
    title, shows, claim = (" ".join(t.split()) for t in (given.title, given.shows, given.claim))
    return Experiment(
        name=path.stem,
        title=title,
        shows=shows,
        claim=claim,
        minutes=given.minutes,
        full=full,
        tasks=tasks,
        tables=given.tables,
        figures=given.figures,
        sweep=given.sweep,
    )


def _parsed(path: Path) -> dict[str, Any]:
    import yaml

    try:
        given = yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(" ".join(str(error).split())) from None
    if not isinstance(given, dict):
        raise RecipeError("it must have names with values, as title: ...")
    return given


def _require_shown(name: str, found: tuple[dict[str, Any], ...], needed: tuple[str, ...]) -> None:
    """Checks tables or figures; each needs a name of its own for its file."""
    for entry in found:
        for part in needed:
            if part not in entry:
                raise RecipeError(f"{name}: {entry.get('name', 'one')} lacks {part}")
    if len({entry["name"] for entry in found}) < len(found):
        raise RecipeError(f"{name}: each needs a name of its own")


def _tasks(given: _Parts, *, full: bool) -> Iterator[Task]:
    """Yields all combinations of the values of each entry of `runs`, which may have own sizes."""
    size, reserved = "full" if full else "small", {one.name for one in fields(_Entry)}
    for settings in given.runs:
        entry = read(_Entry, {name: settings[name] for name in reserved & settings.keys()})
        require_known([entry.kind], KINDS, "kind")
        own = {name: settings[name] for name in settings if name not in reserved}
        own |= getattr(entry, size)
        among = own.pop("workloads", list(given.workloads))
        require_known(among, given.workloads, "workload")
        trained = entry.kind in TRAINED
        shared = given.common | getattr(given, size) if trained else {}
        for workload in _workloads(given, size, among) if trained else [{}]:
            for chosen in _crossed(shared | workload | own):
                yield Task(kind=entry.kind, settings=chosen)


def _workloads(given: _Parts, size: str, among: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the settings of workloads; a workload without this size is left out."""
    if not given.workloads:
        yield {}
    for name in among:
        settings = given.workloads[name]
        sizes = {n: s for n, s in settings.items() if n in ("small", "full")}
        if not sizes or size in sizes:
            own = {n: value for n, value in settings.items() if n not in sizes}
            yield {"workload": name} | own | sizes.get(size, {})


def _crossed(settings: Settings) -> Iterator[dict[str, Any]]:
    choices = [
        value if isinstance(value, list) and name not in LISTS else [value]
        for name, value in settings.items()
    ]
    for values in product(*choices):
        yield dict(zip(settings, values, strict=True))
