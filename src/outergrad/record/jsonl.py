"""Events as lines of JSON, for `outergrad report` and `outergrad watch`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import IO, Any

from outergrad.events import Event, Layer, Run, Scalars, Step


class JSONL:
    """Writes the events of this site into a folder, a line of JSON each.

    Every site has a file of its own there, `site-0.jsonl` and so on: sites of several machines
    may write into a shared folder, or into one each, to be brought together later. A file that is
    there already is appended to: so a training that goes on is one run.

    Args:
        path: the folder of the run; made if there is none.
        every: record every so many-th step.
    """

    def __init__(self, path: str | Path, *, every: int = 10) -> None:
        self.path, self.every = Path(path), checked_every(every)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"JSONL: path={str(path)!r} is a file; name a folder for the run")
        self._file: IO[str] | None = None

    def record(self, event: Event) -> None:
        """Writes a line, at once: what there is of a run that dies can be read.

        Raises:
            OSError: the folder or the file cannot be written; names it.
        """
        path = self.path / f"site-{event.rank}.jsonl"
        try:
            if self._file is None:
                self._file = _open(path)
            self._file.write(json.dumps(line_of(event)) + "\n")
        except OSError as error:
            self._give_up()
            raise OSError(
                error.errno, f"JSONL cannot write: {error.strerror}", str(path)
            ) from error

    def close(self) -> None:
        """Closes the file; a later event opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self.close()
        self._file = None


def _open(path: Path) -> IO[str]:
    """To append whole lines: what a writer that died left of its last one gets an end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", buffering=1, encoding="utf-8")
    if path.stat().st_size:
        with path.open("rb") as written:
            written.seek(-1, 2)
            if written.read() != b"\n":
                file.write("\n")
    return file


def line_of(event: Event) -> dict[str, object]:
    """The fields of an event behind its kind: "run", "layer", "step" or "scalars"."""
    return {"event": type(event).__name__.lower(), **asdict(event)}


def event_of(line: object) -> Event:
    """The event of a line that was read: the inverse of `line_of`.

    Fields that are not known here, of a later version, are passed over.

    Args:
        line: what `json.loads` made of it.

    Raises:
        ValueError: it is no event; says what is wrong with it.
    """
    if not isinstance(line, Mapping):
        raise ValueError(f"an event is an object with names, not {line!r:.40}")
    kind = _KINDS.get(str(line.get("event")))
    if kind is None:
        raise ValueError(f"event={line.get('event')!r:.40} is none of {', '.join(_KINDS)}")
    told = [field for field in fields(kind) if _is_told(field, line)]
    return kind(**{field.name: _read(line, field.name, str(field.type)) for field in told})


def checked_every(every: int) -> int:
    """Returns it.

    Raises:
        ValueError: it is less than one.
    """
    if every < 1:
        raise ValueError(f"every={every!r}; use 1 or more: record every so many-th step")
    return every


def _is_told(field: Field[Any], line: Mapping[str, object]) -> bool:
    if field.name not in line and field.default is MISSING:
        raise ValueError(f"{line['event']} without {field.name}")
    return field.name in line


def _read(line: Mapping[str, object], name: str, kind: str) -> Any:
    value = line[name]
    if value is None and kind.endswith("| None"):
        return None
    try:
        return _READERS[kind.removesuffix(" | None")](value)
    except (TypeError, AttributeError):
        raise ValueError(f"{line['event']}: {name}={value!r:.40} is no {kind}") from None


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _float(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError
    return float(value)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


_KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Run, Layer, Step, Scalars)
}
_READERS: dict[str, Callable[[Any], object]] = {
    "int": _int,
    "float": _float,
    "str": _str,
    "tuple[float, ...]": lambda value: tuple(map(_float, value)),
    "Mapping[str, float]": lambda value: {k: _float(v) for k, v in value.items()},
    "Mapping[str, tuple[int, ...]]": lambda value: {
        k: tuple(map(_int, v)) for k, v in value.items()
    },
}
