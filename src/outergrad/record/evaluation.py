"""Figures of a model on held-out rows: accuracy, AUC and calibration, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Z = 1.959963984540054
"""Quantile of the normal distribution for an interval at 95%."""
MOST_BINS = 10
LEAST_ROWS = 10
"""Rows of a bin of the calibration: fewer would say too little, and too much of single rows."""
_ROUNDING = 0.01
"""Probabilities of a row may add up to so much more or less than 1: bfloat16 rounds so."""

Figure = tuple[float, ...]
"""A value and the bounds of its interval, (value, low, high); (value,) where none is known."""
Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


class Scores(NamedTuple):
    """Predictions of a model.

    Attributes:
        s_NC: a score per row and class.
        are_probabilities: whether scores are probabilities.
    """

    s_NC: Floats
    are_probabilities: bool

    @property
    def predicted(self) -> Labels:
        """Class with the highest score of each row, (N,); the first of several."""
        return self.s_NC.argmax(axis=1)

    def of_class(self, c: int) -> Floats:
        """Returns the score of a class against all others, (N,)."""
        if self.s_NC.shape[1] > 2 or self.are_probabilities:
            return self.s_NC[:, c]
        return self.s_NC[:, c] - self.s_NC[:, 1 - c]


def evaluation(
    y: Any,
    p: Any,
    alone: Any = None,
    metrics: Mapping[Any, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Returns the fields of an `events.Evaluation`, of predictions, metrics or both.

    The arguments are those of `Session.log_eval`.

    Raises:
        ValueError: the arguments are not of the same rows and classes, or not finite.
        TypeError: a metric is no number, or neither predictions nor metrics are given.
    """
    nothing = {"rows": 0, "shares": {}, "alone": {}, "gains": {}, "calibration": ()}
    more = {} if metrics is None else numbers(metrics)
    if y is None or p is None:
        if metrics is None or y is not None or p is not None or alone is not None:
            raise TypeError("session.log_eval: pass y and p, labels and predictions, or metrics=")
        return {**nothing, "figures": more}
    try:
        fields = evaluated(y, p, alone, classes)
    except ValueError as error:
        raise ValueError(f"session.log_eval: {error}") from None
    return {**fields, "figures": {**fields["figures"], **more}}


def evaluated(y: Any, p: Any, alone: Any = None, names: Sequence[str] | None = None) -> dict:
    """Returns the fields of an `events.Evaluation` that follow from labels and predictions.

    Args:
        y: labels, (N,).
        p: predictions, (N,) or (N, C).
        alone: predictions of another model for the same rows; None for none.
        names: of the classes; by default their numbers.

    Raises:
        ValueError: labels and predictions cannot be those of the same rows.
    """
    y_N = _labels(y)
    scores = scores_of(p, y_N, "p")
    found = _figures(y_N, scores)
    fields: dict[str, Any] = {"rows": len(y_N), "shares": shares(y_N, scores, names)}
    fields |= {"figures": found, "alone": {}, "gains": {}, "calibration": ()}
    if scores.are_probabilities:
        fields["calibration"] = bins = calibration(y_N, scores)
        found |= calibration_error(bins)
    if alone is not None:
        other = scores_of(alone, y_N, "alone")
        if other.s_NC.shape != scores.s_NC.shape:
            told = [scored.s_NC.shape[1] for scored in (other, scores)]
            raise ValueError(f"alone has {told[0]} classes, and p has {told[1]}")
        fields |= {"alone": _figures(y_N, other), "gains": gains(y_N, scores, other)}
    return fields


def numbers(values: Mapping[Any, Any]) -> dict[str, Figure]:
    """Returns figures without intervals, of numbers or tensors of one element by name.

    Raises:
        TypeError: a value is no number.
    """
    found = {}
    for name, value in values.items():
        try:
            found[str(name)] = (float(value),)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(
                f"session.log_eval: metric {name!r} is {value!r}: give one number, as by "
                f"average='macro'"
            ) from None
    return found


# -- what was given ---------------------------------------------------------------------------


def _array(given: Any, name: str) -> np.ndarray:
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = (given.double() if given.is_floating_point() else given).numpy()
    found = np.asarray(given)
    if found.dtype.kind not in "biuf":
        raise ValueError(f"{name} holds {found.dtype}: pass a tensor or an array of numbers")
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found


def _labels(y: Any) -> Labels:
    found = _array(y, "y")
    if found.ndim != 1 or not len(found):
        raise ValueError(f"y has the shape {found.shape}: pass one label per row, (N,)")
    if not (np.isfinite(found).all() and (found == np.floor(found)).all()):
        raise ValueError("y has labels that are no whole numbers: number the classes from 0 on")
    return found.astype(np.int64)


def scores_of(p: Any, y_N: Labels, name: str) -> Scores:
    """Returns predictions as a score per row and class.

    Args:
        p: (N,) of the class 1 of two, or (N, C); probabilities, or other scores.
        y_N: labels of the rows.
        name: of the argument, for errors.

    Raises:
        ValueError: they are not of these rows, or not finite.
    """
    found = _array(p, name).astype(np.float64)
    if found.ndim not in (1, 2) or len(found) != len(y_N):
        raise ValueError(
            f"{name} has the shape {found.shape}, and y has {len(y_N)} labels: pass (N,) for two "
            f"classes, or (N, C)"
        )
    if bad := int((~np.isfinite(found)).reshape(len(found), -1).any(axis=1).sum()):
        raise ValueError(f"{name} has NaN or infinities in {bad} of {len(found)} rows")
    classes = 2 if found.ndim == 1 else found.shape[1]
    outside = y_N[(y_N < 0) | (y_N >= classes)]
    if len(outside):
        raise ValueError(
            f"y has the label {outside[0]}, and {name} is of the classes 0 to {classes - 1}"
        )
    within = bool((found >= 0).all() and (found <= 1).all())
    if found.ndim == 1:
        return Scores(np.stack([1 - found if within else -found, found], axis=1), within)
    adds_up = bool((abs(found.sum(axis=1) - 1) < _ROUNDING).all())
    return Scores(found, within and adds_up)


# -- figures ----------------------------------------------------------------------------------


def _figures(y_N: Labels, scores: Scores) -> dict[str, Figure]:
    right = int((scores.predicted == y_N).sum())
    found: dict[str, Figure] = {"accuracy": (right / len(y_N), *wilson(right, len(y_N)))}
    if (area := auc(y_N, scores)) is not None:
        found["auc"] = area
    return found


def shares(y_N: Labels, scores: Scores, names: Sequence[str] | None = None) -> dict[str, float]:
    """Returns the share of the rows of each class, by its name.

    Raises:
        ValueError: there are not as many names as classes.
    """
    classes = scores.s_NC.shape[1]
    if names is not None and len(names) != classes:
        raise ValueError(f"classes has {len(names)} names, and p is of {classes} classes")
    counts = np.bincount(y_N, minlength=classes) / len(y_N)
    return dict(zip(map(str, names or range(classes)), counts.tolist(), strict=True))


def wilson(count: float, rows: int) -> tuple[float, float]:
    """Returns the interval of a proportion at 95%. Source: Wilson, 1927."""
    share, z2 = count / rows, Z * Z / rows
    middle = (share + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows))
    bounds = (0.0 if not count else middle - half), (1.0 if count == rows else middle + half)
    return bounds  # rounding would miss 0 and 1


def auc(y_N: Labels, scores: Scores) -> Figure | None:
    """Returns the area under the ROC curve with its interval; None if all rows are of one class.

    Of more than two classes it is the mean over those that occur, each against all others. The
    interval is that of DeLong, DeLong and Clarke-Pearson, 1988, on the scale of the logit, so that
    it stays within 0 and 1. Where no two rows are in the wrong order, it has no width there: then
    it is Wilson's, of as many rows as the rarest class has.
    """
    found = _influences(y_N, scores)
    if found is None:
        return None
    area, influence_N = found
    error = _error(influence_N)
    if error == 0 or not 0 < area < 1:
        fewest = int(min(count for count in np.bincount(y_N) if count))
        return (area, *wilson(area * fewest, fewest))
    logit, half = math.log(area / (1 - area)), Z * error / (area * (1 - area))
    return (area, *(1 / (1 + math.exp(-max(-700.0, logit + side))) for side in (-half, half)))


def _influences(y_N: Labels, scores: Scores) -> tuple[float, Floats] | None:
    """The area, and how much each row moves it: (N,), whose mean square over N is the variance."""
    classes = np.unique(y_N)
    if len(classes) < 2:
        return None
    classes = [1] if scores.s_NC.shape[1] == 2 else classes.tolist()
    found = [_one_area(y_N == c, scores.of_class(c)) for c in classes]
    areas, influences = zip(*found, strict=True)
    return float(np.mean(areas)), np.mean(influences, axis=0)


def _one_area(positive_N: NDArray[np.bool_], s_N: Floats) -> tuple[float, Floats]:
    """Area of one class against the others; ties count half. See `_influences`."""
    below_N, above_N = _share_below(s_N[~positive_N], s_N), 1 - _share_below(s_N[positive_N], s_N)
    placed_N = np.where(positive_N, below_N, above_N)
    area = float(placed_N[positive_N].mean())
    counts = np.where(positive_N, positive_N.sum(), (~positive_N).sum())
    weights_N = len(s_N) / np.sqrt(counts * np.maximum(counts - 1, 1))
    return area, (placed_N - area) * weights_N


def _share_below(of: Floats, s_N: Floats) -> Floats:
    ordered = np.sort(of)
    sides = [np.searchsorted(ordered, s_N, side) for side in ("left", "right")]
    return (sides[0] + sides[1]) / (2 * len(ordered))


def _error(influence_N: Floats) -> float:
    return math.sqrt(float((influence_N**2).sum())) / len(influence_N)


def gains(y_N: Labels, scores: Scores, alone: Scores) -> dict[str, Figure]:
    """Returns how much better one model is than another on the same rows, with intervals at 95%.

    That of the accuracy is for paired proportions (Agresti and Min, 2005), that of the AUC for
    areas of the same rows (DeLong, DeLong and Clarke-Pearson, 1988).
    """
    rows = len(y_N)
    right_N, other_N = scores.predicted == y_N, alone.predicted == y_N
    won, lost = int((right_N & ~other_N).sum()), int((~right_N & other_N).sum())
    middle, n = (won - lost) / (rows + 2), rows + 2
    half = Z * math.sqrt(max(won + lost + 1 - (won - lost) ** 2 / n, 0.0)) / n
    found: dict[str, Figure] = {"accuracy": ((won - lost) / rows, middle - half, middle + half)}
    ours, theirs = _influences(y_N, scores), _influences(y_N, alone)
    if ours is not None and theirs is not None:
        gain, half = ours[0] - theirs[0], Z * _error(ours[1] - theirs[1])
        found["auc"] = (gain, gain - half, gain + half) if half else (gain,)
    return found


def calibration(y_N: Labels, scores: Scores) -> tuple[Figure, ...]:
    """Returns bins of rows with similar predicted probabilities, from the least on.

    A bin is (rows, mean predicted probability, observed share, low, high). Bins have equally many
    rows, as far as equal probabilities allow, at most 10 bins of at least 10 rows.
    """
    if scores.s_NC.shape[1] == 2:
        predicted_N, true_N = scores.s_NC[:, 1], y_N == 1
    else:
        predicted_N, true_N = scores.s_NC.max(axis=1), scores.predicted == y_N
    order = np.argsort(predicted_N, kind="stable")
    return tuple(_bin(predicted_N[part], true_N[part]) for part in _parts(predicted_N, order))


def _parts(predicted_N: Floats, order: Labels) -> list[Labels]:
    """Cuts rows in their order into bins, nowhere between equal probabilities."""
    least = max(LEAST_ROWS, math.ceil(len(order) / MOST_BINS))
    ordered, parts, begin = predicted_N[order], [], 0
    while len(order) - begin >= least:
        last = ordered[begin + least - 1]
        end = int(np.searchsorted(ordered, last, "right"))
        end = end if len(order) - end >= LEAST_ROWS else len(order)
        parts.append(order[begin:end])
        begin = end
    if parts and begin < len(order):
        parts[-1] = np.concatenate([parts[-1], order[begin:]])
    return parts


def _bin(predicted_N: Floats, true_N: NDArray[np.bool_]) -> Figure:
    rows, count = len(true_N), int(true_N.sum())
    return (float(rows), float(predicted_N.mean()), count / rows, *wilson(count, rows))


def calibration_error(bins: Sequence[Figure]) -> dict[str, Figure]:
    """Returns the mean distance of predicted from observed over the rows; empty without bins."""
    rows = sum(one[0] for one in bins)
    if not rows:
        return {}
    return {"calibration error": (sum(one[0] * abs(one[1] - one[2]) for one in bins) / rows,)}
