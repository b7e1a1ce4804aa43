"""Statement of a session, to hand in: who took part, what travelled, what others could learn."""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outergrad._amounts import amount, many
from outergrad._printable import first_few, printable
from outergrad._version import __version__
from outergrad._whole_files import write_whole
from outergrad.report.page import asset, whole_page
from outergrad.report.recording import Recording, files_of, lates, load_together, require
from outergrad.report.sites import site_names
from outergrad.report.summary import released

if TYPE_CHECKING:
    from pandas import DataFrame

UNKNOWN = "not recorded"
_COUNTS = (
    "how many rows each layer had, how many distinct ids were looked up in an embedding (its "
    "factors name them), and which parameters were used"
)
_START = "once, what is shared of the first site's parameters and buffers, to all others"
_SOURCE = "session.coverage() of the recorded steps"
Fact = tuple[str, str]
"""A label and what is known."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Part of a statement.

    Attributes:
        heading: its heading.
        facts: labels, each with what is known.
    """

    heading: str
    facts: Sequence[Fact]


def statement_of(records: Sequence[Path], now: datetime | None = None) -> list[Section]:
    """Returns a statement about one session, from the records of some or all of its sites.

    What the records do not say is "not recorded". Nothing else is looked up.

    Args:
        records: folders that `og.JSONL` has written, or single files.
        now: date of the statement.

    Raises:
        ImportError: pandas is missing.
        UnreadableRunError: a record cannot be read.
    """
    require("pandas")
    paths = list(dict.fromkeys(path for record in records for path in files_of(record)))
    found = load_together(paths)
    names = site_names(found)
    parts: dict[str, Iterable[Fact]] = {
        "Who took part": _who(found, names),
        "How sites learned together": _how(found),
        "What each other site could learn": _learnt(found, names),
        "What travelled": _travelled(found, names),
        "On the way": _way(found),
        "Ledger of privacy": _released(found),
        "Software": _software(found, names),
        "Records": [*_records(paths), ("Doubts", "; ".join(found.problems) or "none")],
        "This statement": [("Made on", _time((now or datetime.now()).timestamp()))],
    }
    return [Section(heading=heading, facts=[*facts]) for heading, facts in parts.items()]


# -- sections ---------------------------------------------------------------------------------


def _who(recording: Recording, names: Mapping[int, str]) -> Iterator[Fact]:
    recorded = {int(site) for site in recording.runs["site"]}
    for site, name in names.items():
        yield name, _when(recording, site) if site in recorded else "took part; no record here"
    first = recording.changes["site"].min()
    for change in recording.changes[recording.changes["site"] == first].itertuples():
        why = change.why or {}
        for name in change.lost:
            yield f"{name} lost", f"from step {change.step:,} on: {why.get(name, UNKNOWN)}"
        for name in change.back:
            yield f"{name} came", f"from step {change.step:,} on"
    for told in lates(recording.exchanges):
        yield "Late", told
    lost = recording.mishaps[recording.mishaps["what"] == "lost"]
    for mishap in lost.drop_duplicates("step").itertuples():
        present = _present(recording, int(mishap.site), mishap.step) or names
        who = ", ".join(present.get(site, f"site {site}") for site in mishap.sites) or "a site"
        yield "Lost", f"{who}, in step {mishap.step:,}"
    if recording.changes.empty and lost.empty:
        yield "Lost or revoked", "no site, by these records"


def _present(recording: Recording, site: int, step: int) -> dict[int, str]:
    """Names by rank in a step, which are numbered anew at each change; empty before the first."""
    changes = recording.changes
    before = changes[(changes["site"] == site) & (changes["step"] <= step)]
    return {} if before.empty else dict(enumerate(before["sites"].iloc[-1]))


def _when(recording: Recording, site: int) -> str:
    begun = recording.runs[recording.runs["site"] == site]["time"].min()
    tables = (recording.runs, recording.steps, recording.scalars, recording.evaluations)
    last = max(table[table["site"] == site]["time"].max() for table in tables if len(table))
    done = [_last_step(recording.steps, site) + 1, _last_step(recording.scalars, site)]
    done.append(_last_step(recording.evaluations, site))
    told = f"from {_time(begun)} to {_time(last)}"
    return f"{told}, {max(done):,} steps by this record" if max(done) else told


def _last_step(table: DataFrame, site: int) -> int:
    return int(table[table["site"] == site]["step"].max()) if site in set(table["site"]) else -1


def _time(seconds: float) -> str:
    if not 0 <= seconds < 1e11:
        return UNKNOWN
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _how(recording: Recording) -> Iterator[Fact]:
    yield "Method", _all(recording.runs, "method")
    changes = {run.transform for run in recording.runs.itertuples()}
    told = {None: UNKNOWN, "": "none: gradients travel as the method sends them"}
    yield "Transform of gradients", "; ".join(told.get(one, str(one)) for one in changes) or UNKNOWN
    rows = recording.evaluations
    for site, found in rows[rows["rows"] > 0].groupby("site"):
        count = f"{many(len(found), 'time')}, on {int(found['rows'].iloc[-1]):,} rows"
        yield f"Evaluated by {site_names(recording)[int(site)]}", f"{count}; nothing of it was sent"


def _all(runs: DataFrame, column: str) -> str:
    """All values of a column that are known."""
    return "; ".join(dict.fromkeys(str(v) for v in runs[column] if v)) or UNKNOWN


def _learnt(recording: Recording, names: Mapping[int, str]) -> Iterator[Fact]:
    """Yields, of each recorded site, what others learn: the words of `session.coverage()`."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for site in dict.fromkeys(int(site) for site in recording.runs["site"]):
        alike.setdefault(_learnt_of(recording, site), []).append(names[site])
    for told, sites in alike.items():
        for one in told:
            yield f"Of {', '.join(sites)}", one
    yield "Always", _COUNTS
    yield "By", _SOURCE


def _learnt_of(recording: Recording, site: int) -> tuple[str, ...]:
    """Sentences about one site; parameters that travelled in several ways are in several."""
    told = recording.disclosures[recording.disclosures["site"] == site]
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for learn in told["learn"]:
        for name, (travels, reveals) in learn.items():
            groups.setdefault((reveals, travels), {})[name] = None
    numel = _numel(recording)
    return tuple(
        f"{reveals} ({travels}): {_named([*found], numel)}"
        for (reveals, travels), found in groups.items()
    ) or (UNKNOWN,)


def _numel(recording: Recording) -> dict[str, int]:
    shapes = {} if recording.runs.empty else recording.runs["shapes"].iloc[-1]
    return {name: math.prod(shape) for name, shape in shapes.items()}


def _named(names: Sequence[str], numel: Mapping[str, int]) -> str:
    numbers = sum(numel.get(name, 0) for name in names)
    count = f", {numbers:,} numbers" if numbers else ""
    return f"{many(len(names), 'parameter')}{count} ({first_few(names)})"


def _travelled(recording: Recording, names: Mapping[int, str]) -> Iterator[Fact]:
    numel = _numel(recording)
    shared = f"{many(len(numel), 'tensor')}, {sum(numel.values()):,} numbers" if numel else UNKNOWN
    yield "Parameters that are shared", shared
    yield "Start", _START
    yield "Buffers", _buffers(recording)
    for site, steps in recording.steps.groupby("site"):
        totals = steps["total_sent_bytes"]
        # A resumed process counts from 0 again.
        total = int(totals.iloc[-1] + totals.shift()[totals.diff() < 0].sum())
        yield f"Sent by {names[int(site)]}", f"{amount(total)}, up to its last recorded step"


def _buffers(recording: Recording) -> str:
    known = [buffers for buffers in recording.runs["buffers"] if buffers is not None]
    if not known:
        return UNKNOWN
    if not known[-1]:
        return "none beside the start"
    kinds: dict[str, list[str]] = {}
    for name, kind in known[-1].items():
        kinds.setdefault(kind, []).append(name)
    ways = {
        "broadcast": "those of the first site, to all others",
        "mean": "those of every site, to all others, which take the mean",
    }
    return "; ".join(
        f"after each step that wrote to them, {ways.get(kind, kind)}: {first_few(found)}"
        for kind, found in kinds.items()
    )


def _way(recording: Recording) -> Iterator[Fact]:
    yield "Transport and encryption", _all(recording.runs, "transport")


def _released(recording: Recording) -> Iterator[Fact]:
    """Yields what the ledger has counted; sites that count alike are told once."""
    told = released(recording)
    yield "Kept", told[0] if told else "none was kept"
    if told:
        yield "Not covered", "searches, choices made on the data, and what docs/ledger.md lists"


def _software(recording: Recording, names: Mapping[int, str]) -> Iterator[Fact]:
    runs = recording.runs
    yield "Model", _all(runs, "model")
    commit = _all(runs, "commit")
    yield "Commit checked out beside it", commit
    if commit != UNKNOWN:
        yield "Changes since that commit", UNKNOWN
    for column, label in (("outergrad", "outergrad"), ("torch", "PyTorch"), ("python", "Python")):
        yield label, _all(runs, column)
    machines: Any = runs.drop_duplicates("site", keep="last")
    for site, machine in zip(machines["site"], machines["machine"], strict=True):
        yield f"Machine of {names[int(site)]}", str(machine or UNKNOWN)


def _records(paths: Sequence[Path]) -> Iterator[Fact]:
    for path in paths:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        yield path.name, f"{amount(len(content))}, SHA-256 {digest}"


# -- forms ------------------------------------------------------------------------------------


def as_text(sections: Sequence[Section], width: int = 80) -> str:
    """Returns a statement for a terminal."""
    lines = ["Statement of a session of distributed training"]
    for section in sections:
        lines += ["", section.heading, "-" * len(section.heading)]
        for label, told in section.facts:
            text = printable(f"{label}: {told}")
            lines += textwrap.wrap(text, width, subsequent_indent="    ", break_long_words=False)
    return "\n".join(lines)


def write_statement(sections: Sequence[Section], path: Path) -> None:
    """Writes a statement as one HTML page, without scripts, to be printed.

    Raises:
        OSError: the page cannot be written; an existing one stays.
    """
    page = whole_page(
        command="outergrad statement",
        title="Statement of a session",
        lead=f"Of distributed training by outergrad {__version__}, from records of its sites.",
        head="",
        body=f"<main>{''.join(map(_html, sections))}</main>{asset('signature.html')}",
        style=asset("statement.css"),
    )
    write_whole(path, page.encode())


def _html(section: Section) -> str:
    labels = [label for label, _ in section.facts]
    repeated = [k > 0 and labels[k - 1] == label for k, label in enumerate(labels)]
    rows = "".join(
        f"<dt>{'' if again else escape(label)}</dt>"
        f"<dd{' class=unknown' if told == UNKNOWN else ''}>{escape(told)}</dd>"
        for again, (label, told) in zip(repeated, section.facts, strict=True)
    )
    return f"<section><h2>{escape(section.heading)}</h2><dl>{rows}</dl></section>"
