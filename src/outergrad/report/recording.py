"""Recorded runs, read from their files as pandas tables."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outergrad._event_lines import START, Entry, GrowingFile, parsed, read
from outergrad.core.packages import require
from outergrad.core.run_figures import first_again
from outergrad.events import (
    Change,
    Disclosure,
    Drift,
    Evaluation,
    Event,
    Exchange,
    Layer,
    Mishap,
    Privacy,
    Run,
    Step,
    Trial,
)

if TYPE_CHECKING:
    from pandas import DataFrame


_LAYER = re.compile(r'\{"event": "layer", "rank": \d+, "step": (\d+), ')
_NAMED = 3
_CUT = "cut off: the run is still being written, or it died"


class File:
    """One file of a run.

    Attributes:
        name: file name.
        drifts: exchanges that a check of `og.OnDrift` has led to, one row per site.
        problems: lines of text about what could not be read so far.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.problems: list[str] = []
        self._bad: dict[str, list[int]] = {}
        self._lines: list[str] = []
        file = GrowingFile(path)
        try:
            self._lines = file.lines()[0]
        except OSError as error:
            self.problems.append(f"{path.name}: {error.strerror or error}")
        self._rest = file.rest

    def layer_steps(self) -> set[int]:
        """Returns the steps whose layers were recorded, without parsing whole lines."""
        return {int(found[1]) for found in map(_LAYER.match, self._lines) if found}

    def entries(self, layers_of: Container[int] | None = None) -> list[Entry]:
        """Returns the events of the last run; adds to `problems` what cannot be read.

        Args:
            layers_of: steps whose layers are parsed; None for all.
        """
        lines = [
            (number, line)
            for number, line in enumerate(self._lines, start=1)
            if not _left_out(line, layers_of)
        ]
        last, cut = len(self._lines) + 1, self._rest.strip() and parsed(self._rest) is None
        lines += [] if cut else [(last, self._rest)]
        found = [(number, entry) for number, line in lines if (entry := self._event(number, line))]
        if cut:
            self._bad[_CUT] = [last]
        self.problems += [_told(self.name, why, at) for why, at in self._bad.items()]
        return self._last_run(found)

    def _event(self, number: int, line: str) -> Entry | None:
        entry, problems = read(line)
        for why in problems:
            self._bad.setdefault(why, []).append(number)
        return entry

    def _last_run(self, entries: Iterable[tuple[int, Entry]]) -> list[Entry]:
        """Events of the last run, from all events with their line numbers.

        A `Run` at step 0 starts a new run. One at a later step resumes: events that an earlier
        process recorded beyond that step are dropped, since these steps are trained again.
        """
        kept: list[Entry] = []
        begun = 1
        for number, entry in entries:
            if entry["event"] == "run" and entry["step"] > 0:
                again = entry["step"]
                kept = [e for e in kept if e["step"] < first_again(e["event"], again)]
            elif entry["event"] == "run" and kept:
                kept, begun = [], number
            kept.append(entry)
        if begun > 1:
            told = f"the run from line {begun} on is shown, not those before it"
            self.problems.append(f"{self.name}: {told}")
        if kept and kept[0]["event"] != "run":
            told = "does not begin with a run, so its method is not known"
            self.problems.append(f"{self.name}: {told}")
        return kept


def _left_out(line: str, layers_of: Container[int] | None) -> bool:
    if layers_of is None:
        return False
    found = _LAYER.match(line)
    whole = line.endswith("}") and line.find(START, 1) < 0
    return found is not None and whole and int(found[1]) not in layers_of


def _told(name: str, why: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{name}, line {numbers[0]}: {why}"
    shown = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{name}, lines {shown}{more}: {why}"


def thin(values: list[int], most: int) -> list[int]:
    """Returns at most `most` of the values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


_SITE = re.compile(r"site-(\d+)\.jsonl")
_SCALARS = ("site", "step", "time", "name", "value")


class UnreadableRunError(ValueError):
    """Nothing of a run can be shown."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Tables of a recorded run, one row per event; None or NaN where not measured.

    The columns are the fields of the events in `outergrad.events`, with `site` for the rank.

    Attributes:
        runs: one row for each start or resumption of a site, with the `file`.
        steps: one row per recorded step and site; bytes and seconds.
        layers: one row per recorded step, layer and site; `singular_values` as lists, and
            `discarded_energy`, the share of the squared Frobenius norm that was not sent.
        scalars: values logged by the training loop, one row per name: site, step, time, name,
            value.
        evaluations: one row per `session.log_eval`, with figures as tuples by name.
        disclosures: what other sites could learn, one row per site and change of it.
        mishaps: failed steps, one row per site that reported it.
        trials: trials of `og.Auto()`, one row per site that reported it.
        changes: changes of the participating sites, one row per site that reported it.
        privacy: what was released so far, one row per site and time that it was told.
        exchanges: exchanges of `og.LocalSteps(quorum=...)`, one row per site that reported it.
        problems: lines of text about what could not be read or looks wrong.
        ended: True if the last event of every recorded site is its end.
    """

    runs: DataFrame
    steps: DataFrame
    layers: DataFrame
    scalars: DataFrame
    evaluations: DataFrame
    disclosures: DataFrame
    mishaps: DataFrame
    trials: DataFrame
    changes: DataFrame
    exchanges: DataFrame
    drifts: DataFrame
    privacy: DataFrame
    problems: tuple[str, ...]
    ended: bool


def load(run: str | Path) -> Recording:
    """Reads a run that `og.JSONL` wrote, or is still writing.

    Args:
        run: its folder, or one of its files.

    Raises:
        ImportError: pandas is missing.
        UnreadableRunError: there is no such run, or nothing in it can be read.
    """
    require("pandas")
    return load_thinned(run, None)


def load_thinned(run: str | Path, most_steps: int | None) -> Recording:
    """As `load`, with the layers of at most `most_steps` steps; others are not even parsed."""
    files = [File(path) for path in files_of(Path(run))]
    chosen: Container[int] | None = None
    if most_steps is not None:
        chosen = set(thin(sorted(set().union(*(f.layer_steps() for f in files))), most_steps))
    return _recording(str(run), files, chosen)


def load_together(paths: Sequence[Path]) -> Recording:
    """Reads files of the sites of one session, wherever they lie, without layers.

    Args:
        paths: of the files.

    Raises:
        UnreadableRunError: nothing in them can be read.
    """
    return _recording(", ".join(map(str, paths)), [File(path) for path in paths], ())


def _recording(run: str, files: Sequence[File], layers_of: Container[int] | None) -> Recording:
    by_site, problems = _by_site(files, layers_of)
    if not by_site:
        raise UnreadableRunError(f"{run}: {problems[0] if problems else 'its files are empty'}")
    tables = _tables(by_site)
    problems += [*_doubts(tables["runs"], tables["steps"]), *_mishaps(tables["mishaps"])]
    problems += [*_changes(tables["changes"]), *lates(tables["exchanges"])]
    ended = all(events[-1]["event"] == "end" for _, events in by_site.values())
    return Recording(**tables, problems=tuple(problems), ended=ended)


def files_of(run: Path) -> list[Path]:
    """Returns the files of a run's folder, in the order of sites, or the file itself.

    Raises:
        UnreadableRunError: there is no such folder, or no file of a site in it.
    """
    if run.is_file():
        return [run]
    try:
        sites = {int(found[1]): p for p in run.iterdir() if (found := _SITE.fullmatch(p.name))}
    except OSError as error:
        raise UnreadableRunError(f"{run}: {error.strerror}") from None
    if not sites:
        raise UnreadableRunError(f"{run}: there is no site-0.jsonl or other file of a site in it")
    return [sites[site] for site in sorted(sites)]


def _by_site(
    files: Iterable[File], layers_of: Container[int] | None
) -> tuple[dict[int, tuple[str, list[Entry]]], list[str]]:
    """File name and events of each site, and the problems of all files."""
    found: dict[int, tuple[str, list[Entry]]] = {}
    problems: list[str] = []
    for file in files:
        events = file.entries(layers_of)
        problems += file.problems
        if not events:
            problems += [] if file.problems else [f"{file.name}: empty"]
            continue
        site = events[-1]["rank"]
        if site in found:
            problems.append(f"{file.name}: left out: of site {site}, as {found[site][0]} is")
            continue
        found[site] = file.name, [event for event in events if event["rank"] == site]
    return found, problems


def _tables(by_site: dict[int, tuple[str, list[Entry]]]) -> dict[str, DataFrame]:
    events = [event for _, found in by_site.values() for event in found]
    tables = {
        f"{kind.__name__.lower()}s": _table(kind, events)
        for kind in (Run, Step, Evaluation, Disclosure, Mishap, Trial, Change, Exchange, Drift)
    }
    layers = _table(Layer, events)
    layers["discarded_energy"] = layers["relative_error"] ** 2
    files = {site: name for site, (name, _) in by_site.items()}
    tables["runs"]["file"] = tables["runs"]["site"].map(files)
    privacy = _table(Privacy, events)
    return {**tables, "layers": layers, "scalars": _scalars(events), "privacy": privacy}


def _table(kind: type[Event], events: Iterable[Entry]) -> DataFrame:
    from pandas import DataFrame

    chosen = [event for event in events if event["event"] == kind.__name__.lower()]
    columns = {field.name: _column(chosen, field.name, field.type) for field in fields(kind)}
    return DataFrame(columns).rename(columns={"rank": "site"})


def _column(events: Sequence[Entry], name: str, hint: Any) -> Any:
    from pandas import Series

    values = [event.get(name) for event in events]
    if hint in ("float", "float | None"):
        return Series(values, dtype=float)
    return Series(values, dtype="int64" if hint == "int" else object)


def _scalars(events: Iterable[Entry]) -> DataFrame:
    from pandas import DataFrame

    rows = [
        (event["rank"], event["step"], event["time"], name, value)
        for event in events
        if event["event"] == "scalars"
        for name, value in event["values"].items()
    ]
    table = DataFrame(rows, columns=_SCALARS).astype({"time": float, "value": float})
    return table.drop_duplicates(["site", "step", "name"], keep="last", ignore_index=True)


def _doubts(runs: DataFrame, steps: DataFrame) -> list[str]:
    if runs.empty:
        return []
    here, named = set(runs["site"]), int(runs["sites"].max())
    doubts = []
    if missing := sorted(set(range(named)) - here):
        there = ", ".join(map(str, missing))
        doubts.append(f"{len(missing)} of {named} sites are missing: {there}")
    for column in ("sites", "method", "dense_bytes"):
        values = runs.groupby("site")[column].last().unique()
        if len(values) > 1:
            doubts.append(f"the sites differ in {column}: {', '.join(map(str, values))}")
    ends = steps.groupby("site")["step"].max()
    if ends.nunique() > 1:
        told = ", ".join(f"site {site} at step {step}" for site, step in ends.items())
        doubts.append(f"the sites' records do not end at the same step: {told}")
    return doubts


def _changes(changes: DataFrame) -> list[str]:
    """Participating sites from each step on, as reported by the first site."""
    rows = changes[changes["site"] == changes["site"].min()].itertuples()
    return [f"from step {row.step} on: {', '.join(row.sites)} took part" for row in rows]


def lates(exchanges: DataFrame) -> list[str]:
    """Returns who was late for how many exchanges, as reported by the first site."""
    rows = list(exchanges[exchanges["site"] == exchanges["site"].min()].itertuples())
    numbers: dict[str, list[int]] = {}
    for row in rows:
        for name in row.late:
            numbers.setdefault(name, []).append(row.number)
    return [
        f"{name} was late for {len(late)} of {len(rows)} exchanges, last for exchange {late[-1]}; "
        f"what it had changed came with a later one"
        for name, late in numbers.items()
    ]


def _mishaps(mishaps: DataFrame) -> list[str]:
    """Count and last occurrence of each kind of mishap, as reported by the first site."""
    found = []
    for what, rows in mishaps[mishaps["site"] == mishaps["site"].min()].groupby("what", sort=False):
        last = rows.iloc[-1]
        who = ", ".join(map(str, last["sites"])) or "unknown"
        layer = f", {last['layer']}" * bool(last["layer"])
        found.append(f"{len(rows)} x {what}, last in step {last['step']}: site {who}{layer}")
    return found
