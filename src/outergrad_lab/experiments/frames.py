"""Results as pandas tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outergrad_lab.experiments.audited import observed_rows
from outergrad_lab.experiments.gossip import exchanges
from outergrad_lab.labels import Method

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Result = Mapping[str, Any]
Settings = dict[str, Any]

HEADINGS = {
    "training": "Trainings",
    "timing": "Step times",
    "star": "Steps around a hub",
    "sites": "Numbers of sites",
    "iterations": "Power iterations",
    "selection": "Finding entries",
    "audit": "Audits",
    "forward": "Forward gradients",
    "correction": "Changed images",
    "gossip": "Trainings without a centre",
    "pushing": "Push-sum",
    "drift": "Streams that drift",
    "autospec": "Spectra by group",
    "rank-bounds": "Ranks and their bounds",
    "coding": "Sparse codes",
    "pruning": "Pruned channels",
}
"""Headings of the kinds of results."""

MEASURED = (
    *("accuracy", "auc", "test_loss", "train_loss", "sent_bytes", "total_bytes", "fewer", "gap"),
    *("step_s", "compute_s", "error", "best_error", "ratio", "kept_rank", "ms"),
    *("worst_accuracy", "best_accuracy"),
    *("spread", "error_correlation", "odd_ratio"),
    *("rank_bound", "counted_rank", "whole_effective_rank"),
    *("picked", "norm_share", "objective", "psnr", "nonzero"),
    *("loss_gap", "gap_share", "bytes_share", "steps_to", "fewer_near"),
    *("validation_loss", "hours", "line_bytes", "fewer_line", "quicker", "cut_s"),
    *("noise", "site_epsilon"),
    *("delay", "missed", "false_alarms", "exchanges_made", "recovery", "stream_accuracy"),
    *("data_back", "rows_back", "texts_back", "tokens_back", "labels_back", "members_named"),
    *("member_auc", "member_z", "false_rows", "canary_alarms"),
)
"""Columns of `finals` that are no settings."""

OF_METHOD = ("method", "family", "rank", "label")
"""Columns that describe the method."""

OF_COURSE = ("step", "loss", "test_loss", "accuracy", "auc", "sent_bytes", "epoch", "seconds")
"""Columns of `curves` that are no settings."""

_NAMES = ("kind", *OF_METHOD, "seed")
_OF_ITERATIONS = ("case", "way", "swept", "layer", "rank", "iterations", "tolerance")
_LAST = 20


def finals(results: Iterable[Result]) -> DataFrame:
    """Returns outcomes: a row per training, timed method, number of sites, or rank and iterations.

    Columns are all settings; the method's `family`, `rank` and `label`; and `MEASURED`.
    `train_loss` is the mean of the last 20 steps. `gap` is the largest difference at any step to
    the loss of the pooled training of the same settings. `fewer` is the ratio of the bytes of dense
    (ddp where dense is missing) to those of the method. Unknown values are NaN.
    """
    frame = _table([row for result in results for row in _final_rows(result)], "losses", *MEASURED)
    frame[["rank", *MEASURED]] = frame[["rank", *MEASURED]].astype(float)
    sent = frame["sent_bytes"].where(frame["sent_bytes"] > 0)
    frame["fewer"] = _same_run(frame, "dense", sent).fillna(_same_run(frame, "ddp", sent)) / sent
    pooled = _same_run(frame, "pooled", frame["losses"])
    frame["gap"] = [*map(_gap, frame["losses"], pooled)]
    return frame.drop(columns="losses")


def curves(results: Iterable[Result]) -> DataFrame:
    """Returns the course of training: a row per training and step.

    `loss` is there for every step; `test_loss`, `accuracy` and `auc` for the steps with a test.
    `sent_bytes` is the number of bytes that a site had sent by then, interpolated between tests.
    `seconds` is the step times `step_s` of the method's timing with as many sites, once per link.
    """
    from pandas import concat

    results = list(results)
    frame = concat([_table([], *OF_COURSE), *map(_course, of_kind("training", results))])
    timings = finals(of_kind("timing", results)).reindex(
        columns=["method", "sites", "link", "step_s"]
    )
    if timings.empty or frame.empty:
        return frame
    frame = frame.drop(columns=["link", "seconds"], errors="ignore").merge(
        timings.drop_duplicates(["method", "sites", "link"]), on=["method", "sites"], how="left"
    )
    return frame.assign(seconds=frame["step"] * frame["step_s"]).drop(columns="step_s")


def ranks(results: Iterable[Result]) -> DataFrame:
    """Returns effective ranks, a row per training, layer and step; with `epoch` where known."""
    rows = [
        _named(result) | {"layer": layer, "epoch": point["step"] * _epochs(result), **point}
        for result in of_kind("training", results)
        for layer, points in (result.get("layers") or {}).items()
        for point in points
    ]
    return _table(rows, "layer", "step", "epoch", "effective_rank")


def last_ranks(results: Iterable[Result]) -> DataFrame:
    """Returns the rows of `ranks` for the last step of each training."""
    frame = ranks(results)
    keys = ["layer", "seed", *varied(frame.drop(columns=["step", "epoch", "effective_rank"]))]
    keys = list(dict.fromkeys(keys))
    return frame.sort_values("step").groupby(keys, dropna=False, sort=False).tail(1).sort_index()


def per_site(results: Iterable[Result]) -> DataFrame:
    """Returns the last test's accuracy, auc and loss: a row per training and site."""
    rows = [
        _named(result) | {"site": site, **found}
        for result in of_kind("training", results)
        for site, found in enumerate(_last_test(result).get("sites") or ())
    ]
    return _table(rows, "site", "accuracy", "auc", "loss")


def over_seeds(frame: DataFrame, keys: Sequence[str], value: str) -> DataFrame:
    """Returns the mean, min, max and count of a value, a row per group of keys."""
    found = frame.groupby(list(keys), dropna=False, sort=False, observed=True)[value]
    return found.agg(["mean", "min", "max", "count"]).reset_index()


def varied(frame: DataFrame) -> list[str]:
    """Returns the settings that differ, but for the seed; the columns of a method count once."""
    once = {*MEASURED, "seed", "family", "label", "kind"}
    settings = [name for name in frame.columns if name not in once]
    found = [name for name in settings if frame[name].nunique(dropna=False) > 1]
    return [name for name in found if name != "rank" or "method" not in found]


def of_kind(kind: str, results: Iterable[Result]) -> list[Result]:
    """Returns the results of one kind, in their order."""
    return [result for result in results if result["kind"] == kind]


def _table(rows: Sequence[Settings], *columns: str) -> DataFrame:
    """Returns a table that has columns even where it has no rows."""
    from pandas import DataFrame

    frame = DataFrame(rows)
    return frame.reindex(columns=list(dict.fromkeys([*_NAMES, *frame.columns, *columns])))


_USUAL = {"precision": "float32", "optimizer": "adam", "decay": 1.0}
"""Settings of trainings that do not name them."""


def _named(result: Result, **more: Any) -> Settings:
    """Returns a result's settings, with lists as text, and the names of its method."""
    own = _USUAL if result["kind"] == "training" else {}
    settings = {"kind": result["kind"], "seed": 0, **own, **result["settings"], **more}
    row = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in settings.items()
        if name != "methods"
    }
    if "method" not in row:
        return row
    method = Method.parse(row["method"])
    return {"family": method.family, "rank": method.rank, "label": method.label, **row}


def _final_rows(result: Result) -> Iterator[Settings]:
    match result["kind"]:
        case "training":
            yield _named(result) | _outcome(result)
        case "timing":
            for method, found in result.get("steps", {}).items():
                yield _named(result, method=method) | _only(found, "step_s", "sent_bytes")
        case "star":
            for method, found in result["steps"].items():
                both = found["sent_bytes"] + found["received_bytes"]
                timed = _only(found, "step_s", "cut_s") | {"line_bytes": both}
                yield _named(result, method=method) | timed
        case "sites":
            for method, found in result["steps"].items():
                yield _named(result, method=method) | _only(found, *MEASURED)
        case "gossip":
            told = {"exchanges": exchanges(result["settings"])}
            for row in result["rows"]:
                yield _named(result) | told | _only(row, *MEASURED)
        case "audit":
            for row in observed_rows(result):
                yield _named(result) | row
        case _:
            for row in result["rows"]:
                yield _named(result) | _only(row, *_OF_ITERATIONS, *MEASURED)


def _only(values: Mapping[str, Any], *names: str) -> Settings:
    return {name: values[name] for name in names if name in values}


def _last_test(result: Result) -> Mapping[str, Any]:
    return result["tests"][-1] if result["tests"] else {}


def _outcome(result: Result) -> Settings:
    last, losses = _last_test(result), np.asarray(result["losses"], dtype=float)
    total = last.get("sent_bytes")
    return {
        **_only(last, "accuracy", "auc", "validation_loss"),
        **_only(result, "compute_s", "noise", "site_epsilon"),
        "losses": losses,
        "test_loss": last.get("loss"),
        "train_loss": losses[-_LAST:].mean() if len(losses) else math.nan,
        "total_bytes": total,
        "sent_bytes": None if total is None else total / max(last["step"], 1),
    }


def _same_run(frame: DataFrame, method: str, values: Series) -> Series:
    """Returns for every row the value of a method's run with all other settings equal."""
    own = {*OF_METHOD, *MEASURED, "losses"}
    settings = [frame[name] for name in frame.columns if name not in own]
    of_method = values.where(frame["method"] == method)
    return of_method.groupby(settings, dropna=False, sort=False).transform("last")


def _gap(own: Any, pooled: Any) -> float:
    shared = min(np.size(own), np.size(pooled))
    if not shared or np.ndim(own) * np.ndim(pooled) == 0:  # one is NaN: there are no losses
        return math.nan
    gap = float(np.abs(own[:shared] - pooled[:shared]).max())
    return math.inf if math.isnan(gap) else gap


def _course(result: Result) -> DataFrame:
    from pandas import DataFrame

    losses = DataFrame({"loss": result["losses"]}, dtype=float)
    tests = DataFrame(result["tests"]).rename(columns={"loss": "test_loss"})
    frame = losses.assign(step=losses.index + 1).merge(tests, how="outer", on="step")
    known = tests.dropna(subset=["sent_bytes"])
    sent = np.interp(frame["step"], [0, *known["step"]], [0, *known["sent_bytes"]])
    about = {"sent_bytes": sent if len(known) else math.nan, **_named(result)}
    about["epoch"] = frame["step"] * _epochs(result)
    about["compute_s"] = result.get("compute_s", math.nan)
    return frame.drop(columns="sites").assign(**about).astype(dict.fromkeys(OF_COURSE[1:-1], float))


def _epochs(result: Result) -> float:
    """Returns epochs per step; NaN where only steps were requested."""
    epochs = result["settings"].get("epochs")
    return epochs / len(result["losses"]) if epochs and result["losses"] else math.nan
