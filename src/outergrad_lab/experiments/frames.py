"""Results as pandas tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outergrad_lab.experiments.labels import Method

if TYPE_CHECKING:
    from pandas import DataFrame

Result = Mapping[str, Any]
Settings = dict[str, Any]

MEASURED = (
    *("accuracy", "auc", "test_loss", "train_loss", "sent_bytes", "total_bytes", "fewer", "gap"),
    *("step_s", "compute_s", "error", "best_error", "ratio", "kept_rank", "ms"),
)
"""Columns of `finals` that are no settings."""

_NAMES = ("kind", "method", "family", "rank", "label", "seed")
_LAST = 20
_USUAL = {"precision": "float32"}
_OF_ITERATIONS = ("case", "way", "swept", "layer", "rank", "iterations", "tolerance")


def finals(results: Iterable[Result]) -> DataFrame:
    """What came out: a row per training, method timed, number of sites, or rank and iterations.

    Columns are all settings; the method's `family`, `rank` and `label`; and `MEASURED`:
    `train_loss` is the mean of the last 20 steps, `gap` the largest difference to the loss of
    the pooled training of the same settings at any step, `fewer` how many times fewer bytes than
    dense (ddp where dense is not there). What is not known is NaN.
    """
    from pandas import DataFrame, to_numeric

    results = list(results)
    pooled = _pooled_losses(results)
    rows = [row for result in results for row in _final_rows(result, pooled)]
    _add_fewer(rows)
    frame = DataFrame(rows)
    frame = frame.reindex(columns=list(dict.fromkeys([*_NAMES, *frame.columns, *MEASURED])))
    frame["seed"] = frame["seed"].fillna(0)
    for name in ("rank", *MEASURED):
        frame[name] = to_numeric(frame[name]).astype(float)
    return frame


def curves(results: Iterable[Result]) -> DataFrame:
    """The course of training: a row per training and step.

    `loss` is of every step; `test_loss`, `accuracy` and `auc` of those that were tested.
    `sent_bytes` is what a site had sent by then, in between two tests in proportion; `seconds`
    the step times `step_s` of the method's timing with as many sites, once per link.
    """
    from pandas import concat

    results = list(results)
    frames = [_course(result) for result in _of("training", results)]
    if not frames:
        return _empty("step", "loss", "test_loss", "accuracy", "auc", "sent_bytes", "seconds")
    frame = concat(frames, ignore_index=True)
    timings = finals(_of("timing", results)).reindex(columns=["method", "sites", "link", "step_s"])
    if timings.empty:
        return frame.assign(seconds=math.nan)
    frame = frame.drop(columns="link", errors="ignore").merge(
        timings.drop_duplicates(["method", "sites", "link"]), on=["method", "sites"], how="left"
    )
    return frame.assign(seconds=frame["step"] * frame["step_s"]).drop(columns="step_s")


def ranks(results: Iterable[Result]) -> DataFrame:
    """Effective ranks: a row per training, layer and step; `epoch` where epochs were counted."""
    from pandas import DataFrame

    rows = [
        _named(result) | {"layer": layer, "epoch": point["step"] * _epochs(result), **point}
        for result in _of("training", results)
        for layer, points in (result.get("layers") or {}).items()
        for point in points
    ]
    return DataFrame(rows) if rows else _empty("layer", "step", "epoch", "effective_rank")


def last_ranks(results: Iterable[Result]) -> DataFrame:
    """Of `ranks` those of the last step of each training."""
    frame = ranks(results)
    keys = ["layer", "seed", *varied(frame.drop(columns=["step", "epoch", "effective_rank"]))]
    keys = list(dict.fromkeys(keys))
    return frame.sort_values("step").groupby(keys, dropna=False, sort=False).tail(1).sort_index()


def per_site(results: Iterable[Result]) -> DataFrame:
    """What the last test found: a row per training and site; accuracy, auc, loss."""
    from pandas import DataFrame

    rows = [
        _named(result) | {"site": site, **found}
        for result in _of("training", results)
        for site, found in enumerate(_last_test(result).get("sites") or ())
    ]
    return DataFrame(rows) if rows else _empty("site", "accuracy", "auc", "loss")


def over_seeds(frame: DataFrame, keys: Sequence[str], value: str) -> DataFrame:
    """The mean, min, max and count of a value, a row per group of keys."""
    found = frame.groupby(list(keys), dropna=False, sort=False)[value]
    return found.agg(["mean", "min", "max", "count"]).reset_index()


def varied(frame: DataFrame) -> list[str]:
    """The settings whose values differ, but for the seed; what names a method counts once."""
    once = {*MEASURED, "seed", "family", "label", "kind"}
    settings = [name for name in frame.columns if name not in once]
    found = [name for name in settings if frame[name].nunique(dropna=False) > 1]
    return [name for name in found if name != "rank" or "method" not in found]


def _of(kind: str, results: Iterable[Result]) -> list[Result]:
    return [result for result in results if result["kind"] == kind]


def _empty(*names: str) -> DataFrame:
    from pandas import DataFrame

    return DataFrame(columns=[*_NAMES, *names])


def _named(result: Result, **more: Any) -> Settings:
    """A result's settings, with lists as text, and what its method is called."""
    own = _USUAL if result["kind"] == "training" else {}
    settings = {"kind": result["kind"], "seed": 0, **own, **result["settings"], **more}
    settings.pop("methods", None)
    row = {name: _plain(value) for name, value in settings.items()}
    if "method" not in row:
        return row
    method = Method.parse(row["method"])
    return {"family": method.family, "rank": method.rank, "label": method.label, **row}


def _plain(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _final_rows(result: Result, pooled: Mapping[str, Any]) -> Iterator[Settings]:
    match result["kind"]:
        case "training":
            yield _named(result) | _outcome(result) | {"gap": _gap(result, pooled)}
        case "timing":
            for method, found in result.get("steps", {}).items():
                yield _named(result, method=method) | _only(found, "step_s", "sent_bytes")
        case "sites":
            for method, found in result["steps"].items():
                yield _named(result, method=method) | _only(found, *MEASURED)
        case "iterations":
            for row in result["rows"]:
                yield _named(result) | _only(row, *_OF_ITERATIONS, *MEASURED)


def _only(values: Mapping[str, Any], *names: str) -> Settings:
    return {name: values[name] for name in names if name in values}


def _last_test(result: Result) -> Mapping[str, Any]:
    return result["tests"][-1] if result["tests"] else {}


def _outcome(result: Result) -> Settings:
    last, losses = _last_test(result), np.asarray(result["losses"][-_LAST:], dtype=float)
    total = last.get("sent_bytes")
    return {
        **_only(last, "accuracy", "auc"),
        "test_loss": last.get("loss"),
        "train_loss": float(losses.mean()) if len(losses) else math.nan,
        "total_bytes": total,
        "sent_bytes": None if total is None else total / max(last["step"], 1),
    }


def _but_method(settings: Mapping[str, Any]) -> str:
    own = ("method", "methods", "family", "label", "rank", *MEASURED)
    return json.dumps({k: v for k, v in settings.items() if k not in own}, sort_keys=True)


def _pooled_losses(results: Iterable[Result]) -> dict[str, Any]:
    trainings = [(result["settings"], result["losses"]) for result in _of("training", results)]
    return {_but_method(s): losses for s, losses in trainings if s.get("method") == "pooled"}


def _gap(result: Result, pooled: Mapping[str, Any]) -> float:
    other = pooled.get(_but_method(result["settings"]))
    if not other or not result["losses"]:
        return math.nan
    shared = min(len(other), len(result["losses"]))
    own, other = (np.asarray(losses[:shared], dtype=float) for losses in (result["losses"], other))
    gap = float(np.abs(own - other).max())
    return math.inf if math.isnan(gap) else gap


def _add_fewer(rows: Sequence[Settings]) -> None:
    """In place, to the rows of all methods that send something."""
    whole: dict[str, dict[str, float]] = {"dense": {}, "ddp": {}}
    for row in rows:
        if row.get("method") in whole and row.get("sent_bytes"):
            whole[row["method"]][_but_method(row)] = row["sent_bytes"]
    known = whole["ddp"] | whole["dense"]
    for row in rows:
        if row.get("sent_bytes"):
            row["fewer"] = known.get(_but_method(row), math.nan) / row["sent_bytes"]


def _course(result: Result) -> DataFrame:
    from pandas import DataFrame

    tests = {test["step"]: test for test in result["tests"]}
    losses = dict(enumerate(result["losses"], start=1))
    steps = sorted(losses.keys() | tests.keys())
    columns = {
        "loss": [losses.get(step) for step in steps],
        "test_loss": [tests.get(step, {}).get("loss") for step in steps],
        "accuracy": [tests.get(step, {}).get("accuracy") for step in steps],
        "auc": [tests.get(step, {}).get("auc") for step in steps],
        "sent_bytes": _sent(steps, result["tests"]),
        "epoch": [step * _epochs(result) for step in steps],
    }
    return DataFrame(columns, dtype=float).assign(step=steps, **_named(result))


def _sent(steps: Sequence[int], tests: Sequence[Mapping[str, Any]]) -> Any:
    """Bytes by each step, in proportion between the tests; NaN where nobody counted."""
    known = {test["step"]: test["sent_bytes"] for test in tests if test["sent_bytes"] is not None}
    if not known:
        return [math.nan] * len(steps)
    known = {0: 0, **known}
    return np.interp(steps, list(known), list(known.values()))


def _epochs(result: Result) -> float:
    """Epochs per step; NaN where only steps were asked for."""
    epochs = result["settings"].get("epochs")
    return epochs / len(result["losses"]) if epochs and result["losses"] else math.nan
