"""Overview of a run: its state, traffic, and events."""

from __future__ import annotations

import math
from collections import Counter

from rich.text import Text

from outergrad._amounts import amount, duration, seconds, short, times
from outergrad.tools.watch.chart import chart
from outergrad.tools.watch.layer_table import agreeing
from outergrad.tools.watch.state import Watched, WatchedSite
from outergrad.tools.watch.summary import Speed, agreement, noise_batches, outliers, speed
from outergrad.tools.watch.view import DIM, LABEL, View, dotted, labelled, rule, sides

_BAR = 24
_DOTS = 16
_SIGNS = {
    "compress": ("█", "magenta"),
    "replay": ("▓", "blue"),
    "wait": ("▒", "yellow"),
    "the rest": ("░", DIM),
}


def head(watched: Watched, view: View) -> list[Text]:
    """Returns the lines with the run's name, method, state and progress."""
    state = _state(watched, view.now)
    method = watched.run.method if watched.run else "a run of which the beginning was not written"
    path, room = str(view.path), view.width - len(state[0]) - len(method) - 6
    title = Text.assemble((path if len(path) <= room else view.path.name, "bold"), "  ", method)
    return [sides(title, Text(*state), view.width), rule(view), _progress(watched)]


def _state(watched: Watched, now: float) -> tuple[str, str]:
    ends = [site.ended for site in watched.sites if site.ended]
    if len(ends) == len(watched.sites):
        error = next((f" by {end.error}" for end in ends if end.error), "")
        ago = duration(now - max(site.heard for site in watched.sites))
        return f"■ ended{error} {ago} ago", "red" if error else "green"
    quiet = silence(watched, now)
    return ("● live", "green") if quiet is None else (f"○ no news for {duration(quiet)}", "yellow")


def _progress(watched: Watched) -> Text:
    run, step_s = watched.run, speed(watched).step_s
    figures = [f"{short(1 / step_s)} per second", seconds(step_s)] if step_s else []
    if run:
        since = f" since step {run.step:,}" if run.step else ""
        figures.append(duration(max(s.time for s in watched.sites) - run.time) + since)
        shared = amount(sum(map(math.prod, run.shapes.values())), "").strip()
        figures.append(f"{shared} parameters shared")
    step = max(site.step for site in watched.sites)
    return labelled("step", dotted((f"{step:,}", "bold"), *figures))


def silence(watched: Watched, now: float) -> float | None:
    """Returns the seconds since news of any site, if all sites that have not ended are silent."""
    silences = [site.silence_s(now) for site in watched.sites if not site.ended]
    known = [s for s in silences if s is not None]
    return min(known) if known and len(known) == len(silences) else None


def traffic(watched: Watched, view: View) -> list[Text]:
    """Returns the lines about bytes, seconds and sites."""
    told = speed(watched)
    return [
        labelled("sent", _sent(told)),
        labelled("time", _times(told, view.width)),
        labelled("sites", _sites(watched, view)),
        *_noise(watched),
        *_outliers(watched),
        *_silent_ones(watched, view),
        *_trial(watched),
        *_mishaps(watched),
        *_change(watched),
    ]


def _sent(told: Speed) -> Text:
    if told.sent_bytes is None or told.total_sent_bytes is None:
        return Text("nothing recorded yet", DIM)
    return dotted(
        Text.assemble((amount(told.sent_bytes), "bold"), " per step"),
        f"{amount(told.bytes_per_s)}/s" if told.bytes_per_s else None,
        f"{amount(told.total_sent_bytes)} in all",
        (f"{times(told.fewer)}\u00d7 fewer than DDP", "bold green") if told.fewer else None,
    )


def _times(told: Speed, width: int) -> Text:
    known = sum(told.parts_s.values())
    whole = max(told.step_s or 0.0, known)
    rest = {"the rest": max(0.0, whole - known)} if told.step_s else {}
    parts = [(name, s, *_SIGNS[name]) for name, s in {**told.parts_s, **rest}.items() if s]
    columns = _BAR if width >= 76 else 0
    bar = [(sign * round(columns * s / whole), colour) for _, s, sign, colour in parts]
    legend = [
        part
        for name, s, sign, colour in parts
        for part in ("  ", (sign, colour), f" {name} ", (_share(s, told.step_s and whole), "bold"))
    ]
    return Text.assemble(*bar, *legend[0 if bar and columns else 1 :])


def _share(part_s: float, whole_s: float | None) -> str:
    return f"{part_s / whole_s:.0%}" if whole_s else seconds(part_s)


def _sites(watched: Watched, view: View) -> Text:
    count = watched.run.sites if watched.run else len(watched.sites)
    there = {site.rank: site for site in watched.sites}
    dots = [_site_dot(there.get(rank), view.now) for rank in range(min(count, _DOTS))]
    parts = [Text(" ").join(dots), f"  {count}" if count > _DOTS else ""]
    if len(there) < count:
        parts += [f"  {len(there)} of {count} write here"]
    told = agreement(watched)
    if told and count > 1:
        parts += ["  agree ", (f"{told.least:.2f}", agreeing(told.least)), f" (site {told.site})"]
        parts += [" to ", (f"{told.most:.2f}", agreeing(told.most)), "  "]
        wide = max(0, min(40, view.width - 2 - LABEL - len(Text.assemble(*parts))))
        parts += [(chart(told.history, wide, least_span=0.05)[0], "green")]
    return Text.assemble(*parts)


def _site_dot(site: WatchedSite | None, now: float) -> Text:
    if site is None:
        return Text("·", DIM)
    if site.ended:
        return Text("■", "red" if site.ended.error else "green")
    return Text("●", "green") if site.silence_s(now) is None else Text("○", "yellow")


def _noise(watched: Watched) -> list[Text]:
    batches = noise_batches(watched)
    if batches is None:
        return []
    return [labelled("noise", Text(f"as much as signal in {times(batches)} batches of a site"))]


def _outliers(watched: Watched) -> list[Text]:
    found = outliers(watched)
    if not found:
        return []
    worst, others = found[0], len(found) - 1
    told = (
        f"{worst.times:.1f}\u00d7 the median, in {worst.layer}: {worst.sample} of site {worst.site}"
    )
    return [labelled("samples", dotted((told, "yellow"), f"{others} more" if others else None))]


def _trial(watched: Watched) -> list[Text]:
    trial = next((site.trial for site in watched.sites if site.trial), None)
    if trial is None:
        return []
    methods = " / ".join(dict.fromkeys(trial.methods))
    took = f"{seconds(trial.seconds)} against {seconds(trial.kept_seconds)}"
    return [labelled("trial", dotted(f"{methods}: {trial.outcome}", took, f"step {trial.step:,}"))]


def _mishaps(watched: Watched) -> list[Text]:
    """Line with failed steps, from the site that reports most of them."""
    mishaps = max((site.mishaps for site in watched.sites), key=len)
    if not mishaps:
        return []
    last, counts = mishaps[-1], Counter(mishap.what for mishap in mishaps)
    who = f"site {', '.join(map(str, last.sites))}" if last.sites else "a site"
    told = ", ".join(f"{count} {what}" for what, count in counts.items())
    about = f"; step {last.step:,} {last.what}: {who}" + f", {last.layer}" * bool(last.layer)
    return [labelled("mishaps", Text(told + about, "bold yellow"))]


def _change(watched: Watched) -> list[Text]:
    changes = [site.change for site in watched.sites if site.change is not None]
    if not changes:
        return []
    last = max(changes, key=lambda change: change.epoch)
    return [labelled("sites", Text(f"{', '.join(last.sites)} from step {last.step:,} on", "bold"))]


def _silent_ones(watched: Watched, view: View) -> list[Text]:
    """Line with sites that are silent while others are not, or that became silent first."""
    quiet = [s for s in watched.sites if s.silence_s(view.now) is not None]
    last = max(site.step for site in watched.sites)
    if len(quiet) == sum(site.ended is None for site in watched.sites):
        quiet = [site for site in quiet if site.step < last]
    if not quiet:
        return []
    told = [f"{s.rank} for {duration(view.now - s.heard)}, at step {s.step:,}" for s in quiet]
    return [labelled("", Text("silent: site " + "; site ".join(told), "bold yellow"))]
