"""Which of the events in a file are those of its run."""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.report._lines import Entry


def of_last_run(name: str, entries: Sequence[tuple[int, Entry]]) -> tuple[list[Entry], list[str]]:
    """The events of the last run in a file, and what there is to say of the others.

    A `Run` at step 0 starts anew. One at a later step goes on with what was before that step:
    what an earlier process recorded beyond it has been trained again.

    Args:
        name: of the file.
        entries: its events, with the numbers of their lines.
    """
    kept: list[Entry] = []
    begun, problems = 1, []
    for number, entry in entries:
        if entry["event"] == "run" and entry["step"] > 0:
            kept = [earlier for earlier in kept if _before(earlier, entry["step"])]
        elif entry["event"] == "run" and kept:
            kept, begun = [], number
        kept.append(entry)
    if begun > 1:
        problems.append(f"{name}: the run from line {begun} on is shown, not those before it")
    if kept and kept[0]["event"] != "run":
        problems.append(f"{name}: does not begin with a run, so its method is not known")
    return kept, problems


def _before(entry: Entry, step: int) -> bool:
    """Scalars count the steps that were done, the other events those before them."""
    return entry["step"] < step or (entry["event"] == "scalars" and entry["step"] == step)
