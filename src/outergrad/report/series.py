"""Data of the page's figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from outergrad.report.recording import Recording, thin
from outergrad.report.sites import site_names
from outergrad.report.summary import TIMES, dense_bytes, time_split

if TYPE_CHECKING:
    from pandas import DataFrame, Series

POINTS = 200
_SPECTRA = 60
_MOST = 40
"""Groups that are drawn."""
_DIGITS = 4
_MEASURES = (
    "effective_rank",
    "rank_bound",
    "relative_error",
    "residual_norm",
    "cosine",
    "duplicates",
    "sample_norm",
)


def series(recording: Recording) -> dict[str, Any]:
    """Returns all data that the page shows of one run, in JSON types; not finite becomes None."""
    return {
        "names": site_names(recording),
        "evaluations": _evaluations(recording),
        "sites": sorted({int(site) for site in recording.layers["site"].unique()}),
        "dense_bytes": dense_bytes(recording),
        "scalars": _scalars(recording),
        "bytes": _steps(recording.steps, ("sent_bytes",)),
        "time": _times(recording.steps),
        "layers": _layers(recording),
        "spectra": _spectra(recording.layers),
        "groups": _groups(recording.layers),
    }


def _evaluations(recording: Recording) -> dict[str, dict[str, Any]]:
    """Figures of each site over its evaluations, by its name, and the last calibration."""
    found, sites = {}, site_names(recording)
    for site, rows in recording.evaluations.groupby("site"):
        rows = rows.iloc[thin([*range(len(rows))], POINTS)]
        names = dict.fromkeys(name for figures in rows["figures"] for name in figures)
        calibrations = [bins for bins in rows["calibration"] if bins]
        found[sites[int(site)]] = {
            "step": [*map(int, rows["step"])],
            "figures": {
                name: [_numbers(figures.get(name, ())) for figures in rows["figures"]]
                for name in names
            },
            "calibration": [_numbers(one) for one in (calibrations or [()])[-1]],
        }
    return found


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [float(f"{v:.{_DIGITS}g}") if math.isfinite(v) else None for v in values]


def _drawn(table: DataFrame, **how: str) -> DataFrame:
    """Means of neighbouring rows (or `how`), at most `POINTS`, each with its last step."""
    groups = [i * POINTS // max(len(table), POINTS) for i in range(len(table))]
    table = table.reset_index()
    return table.groupby(groups).agg({**dict.fromkeys(table, "mean"), "step": "last", **how})


def _steps(steps: DataFrame, names: Iterable[str]) -> dict[str, Any]:
    table = _drawn(steps.groupby("step")[[*names]].mean())
    return {"step": [*map(int, table["step"])], **{name: _numbers(table[name]) for name in names}}


def _times(steps: DataFrame) -> dict[str, Any]:
    split = time_split(steps)
    means = _numbers(split[name].mean() for name in TIMES)
    return {"mean": dict(zip(TIMES, means, strict=True)), **_steps(split, TIMES)}


def _scalars(recording: Recording) -> dict[str, Any]:
    """Curves by name: mean, low and high over sites and neighbouring steps, with time and bytes."""
    times = [recording.runs["time"], recording.steps["time"], recording.scalars["time"]]
    start = min((t.min() for t in times if len(t)), default=math.nan)
    totals = recording.steps.groupby("step")["total_sent_bytes"].mean()
    # A resumed process counts from 0 again.
    totals += totals.shift().where(totals.diff() < 0, 0).cumsum()
    return {
        str(name): _curve(rows, start, totals) for name, rows in recording.scalars.groupby("name")
    }


def _curve(rows: DataFrame, start: float, totals: Series) -> dict[str, Any]:
    table = rows.groupby("step").agg(
        mean=("value", "mean"), low=("value", "min"), high=("value", "max"), time=("time", "max")
    )
    table = _drawn(table, low="min", high="max", time="last")
    return {
        **{name: _numbers(table[name]) for name in ("mean", "low", "high")},
        "step": [*map(int, table["step"])],
        "seconds": _numbers(table["time"] - start),
        "bytes": _numbers(_sent_bytes(totals, table["step"])),
    }


def _sent_bytes(totals: Series, steps: Series) -> Iterable[float]:
    """Total bytes after each number of steps, interpolated linearly between recorded steps."""
    import numpy as np

    return np.interp(steps - 1, totals.index, totals) if len(totals) else [math.nan] * len(steps)


def _layers(recording: Recording) -> dict[str, Any]:
    table = recording.layers
    names = [str(name) for name in table["layer"].unique()]
    steps = thin(sorted({int(step) for step in table["step"]}), POINTS)
    table = table[table["step"].isin(steps)]
    usual = table.groupby(["layer", "travels"]).size().unstack().idxmax(axis="columns")
    at = (names, steps)
    by_site = {str(site): _grid(rows, "cosine", *at) for site, rows in table.groupby("site")}
    return {
        "names": names,
        "step": steps,
        "sent_bytes": _numbers(table.groupby("layer")["sent_bytes"].mean().reindex(names)),
        "dense_bytes": _numbers(_dense(recording, names)),
        "travels": [str(how) for how in usual.reindex(names)],
        **{measure: _grid(table, measure, *at) for measure in _MEASURES},
        "cosine_by_site": {site: grid for site, grid in by_site.items() if grid},
    }


def _grid(
    table: DataFrame, measure: str, names: list[str], steps: list[int]
) -> list[list[float | None]] | None:
    """Means over sites, a row per layer, a column per step; None if there are none.

    Also None if no relative error is above 0. Layers may be measured in turn: the last measurement
    fills the steps between.
    """
    nothing = table[measure].isna() if measure != "relative_error" else ~(table[measure] > 0)
    if nothing.all():
        return None
    grid = table.groupby(["layer", "step"])[measure].mean().unstack()
    grid = grid.reindex(names).reindex(columns=steps).ffill(axis="columns")
    return [_numbers(row) for row in grid.to_numpy()]


def _dense(recording: Recording, names: list[str]) -> list[float]:
    """DDP's bytes for each layer, in proportion to its parameters."""
    total = dense_bytes(recording)
    if total is None:
        return [math.nan] * len(names)
    numel = {name: math.prod(s) for name, s in recording.runs["shapes"].iloc[-1].items()}
    shares = [sum(numel.get(n, 0) for n in _parameters(name, names, numel)) for name in names]
    return [total * share / sum(numel.values()) if share else math.nan for share in shares]


def _parameters(layer: str, layers: Collection[str], numel: Collection[str]) -> set[str]:
    """Parameters of a layer: all in a block, or a weight with its bias unless sent alone."""
    if layer not in numel:
        return {name for name in numel if name.startswith(f"{layer}.")}
    head, weight, tail = layer.rpartition("weight")
    return {layer} | ({f"{head}bias{tail}"} - set(layers) if weight else set())


def _spectra(layers: DataFrame) -> dict[str, Any]:
    """Singular values per layer and step, from the first site that has them."""
    table = layers[layers["singular_values"].notna()].drop_duplicates(["layer", "step"])
    steps = thin(sorted({int(step) for step in table["step"]}), _SPECTRA)
    table = table[table["step"].isin(steps)].set_index(["layer", "step"])["singular_values"]
    found = {at: _numbers(values) for at, values in table.items()}
    names = [str(name) for name in layers["layer"].unique()]
    values = [_held([found.get((name, step)) for step in steps]) for name in names]
    return {"step": steps, "values": values}


def _groups(layers: DataFrame) -> dict[str, Any]:
    """Largest singular values by kind, layer, group and step, on average over sites."""
    table = layers[layers["group_rows"].notna()]
    steps = thin(sorted({int(step) for step in table["step"]}), _SPECTRA)
    table = table[table["step"].isin(steps)]
    names = sorted({label for rows in table["group_rows"] for label in rows}, key=_natural)[:_MOST]
    of_layers = [str(name) for name in table["layer"].unique()]
    found: dict[str, Any] = {"names": names, "layers": of_layers, "step": steps}
    for kind in ("gradient", "activations", "deltas"):
        found[kind] = [
            _largest_by_group(table[table["layer"] == layer], f"group_{kind}", names, steps)
            for layer in of_layers
        ]
    return found


def _largest_by_group(
    rows: DataFrame, column: str, names: list[str], steps: list[int]
) -> list[list[float | None]]:
    """Means over sites, a row per group, a column per step; the last one fills those between."""
    from pandas import DataFrame

    told = [
        (label, step, values[0])
        for step, of_groups in zip(rows["step"], rows[column], strict=True)
        for label, values in of_groups.items()
        if values
    ]
    table = DataFrame(told, columns=["label", "step", "value"]).astype({"value": float})
    grid = table.groupby(["label", "step"])["value"].mean().unstack()
    grid = grid.reindex(names).reindex(columns=steps).ffill(axis="columns")
    return [_numbers(row) for row in grid.to_numpy()]


def _natural(label: str) -> tuple[int, int, str]:
    """Sorts numbers by their size, before texts."""
    return (0, int(label), "") if label.isdecimal() else (1, 0, label)


def _held(row: list[list[float | None] | None]) -> list[list[float | None] | None]:
    return [next((v for v in row[k::-1] if v is not None), None) for k in range(len(row))]
