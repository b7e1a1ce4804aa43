"""An experiment as its YAML describes it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.kinds import KINDS
from outergrad_lab.experiments.task import Settings, Task

IN_PACKAGE = Path(__file__).with_name("experiments")
IN_REPOSITORY = Path(__file__).parents[3] / "experiments"

LISTS = ("methods", "widths", "local")
"""Settings that are lists by nature; other lists mean one task for each of their values."""

_TEXTS = ("title", "shows", "claim")
_PARTS = ("minutes", "common", "small", "full", "runs", "tables", "figures")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment at one size.

    Attributes:
        name: What it is called.
        title: In a few words.
        shows: What it must show.
        claim: Which claim of the paper it tests.
        minutes: How long the small size took on 2 cores.
        full: Whether it has the paper's size, not the small one.
        tasks: What to run, each once.
        tables: What to write, as the YAML has it.
        figures: What to draw, as the YAML has it.
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

    @property
    def size(self) -> str:
        """Small or full."""
        return "full" if self.full else "small"

    @property
    def command(self) -> str:
        """What runs it."""
        return f"outergrad reproduce {self.name}{' --full' if self.full else ''}"


def names() -> list[str]:
    """Of all experiments."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def experiment(name: str, *, full: bool = False) -> Experiment:
    """Reads an experiment.

    Args:
        name: One of `names`, or a path to a YAML of one's own.
        full: Whether the paper's size is wanted.

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
    given = _parsed(path)
    _require_known(given, (*_TEXTS, *_PARTS), "part")
    texts = {name: " ".join(_typed(given, name, str, "be a text").split()) for name in _TEXTS}
    tasks = tuple(dict.fromkeys(_tasks(given, full=full)))
    if not tasks:
        raise RecipeError("runs: there are none")
    for task in tasks:
        KINDS[task.kind].check(task.settings)
    return Experiment(
        name=path.stem,
        **texts,
        minutes=float(_typed(given, "minutes", int | float, "be a number")),
        full=full,
        tasks=tasks,
        tables=_shown(given, "tables"),
        figures=_shown(given, "figures"),
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


def _typed(given: Mapping[str, Any], name: str, kind: Any, what: str) -> Any:
    if not isinstance(given.get(name), kind):
        raise RecipeError(f"{name} must {what}")
    return given[name]


def _dicts(given: Mapping[str, Any], name: str) -> tuple[dict[str, Any], ...]:
    values = given.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise RecipeError(f"{name} must be a list of names with values")
    return tuple(values)


def _shown(given: Mapping[str, Any], name: str) -> tuple[dict[str, Any], ...]:
    """Tables or figures: each has a file of its name."""
    found = _dicts(given, name)
    needed = ("name", "rows", "value") if name == "tables" else ("name", "x", "y", "lines")
    for entry in found:
        for part in needed:
            if part not in entry:
                raise RecipeError(f"{name}: {entry.get('name', 'one')} lacks {part}")
    if len({entry["name"] for entry in found}) < len(found):
        raise RecipeError(f"{name}: each needs a name of its own")
    return found


def _settings(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _typed({name: given.get(name) or {}}, name, dict, "have names with values")


def _require_known(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for name in given:
        if name not in known:
            raise RecipeError(f"no {what} {name!r}: there are {', '.join(known)}")


def _tasks(given: Mapping[str, Any], *, full: bool) -> Iterator[Task]:
    """Every combination of the values of every entry of `runs`, which may have sizes of its own."""
    size = "full" if full else "small"
    for entry in _dicts(given, "runs"):
        kind = entry.get("kind", "training")
        _require_known({kind: None}, tuple(KINDS), "kind")
        own = {name: entry[name] for name in entry if name not in ("kind", "small", "full")}
        own |= _settings(entry, size)
        shared = {**_settings(given, "common"), **_settings(given, size)}
        for settings in _crossed({**(shared if kind == "training" else {}), **own}):
            yield Task(kind=kind, settings=settings)


def _crossed(settings: Settings) -> Iterator[dict[str, Any]]:
    choices = [
        value if isinstance(value, list) and name not in LISTS else [value]
        for name, value in settings.items()
    ]
    for values in product(*choices):
        yield dict(zip(settings, values, strict=True))
