"""A tap that writes what this site sends to a file, for an audit of the user's own training."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from outergrad._version import __version__
from outergrad._whole_files import PRIVATE, load_plain, save_whole
from outergrad.core.payload import Entries
from outergrad.core.sent import Kind, Sent, StepTap, TappedRun, Way, copied
from outergrad.core.types import Factors, Slot
from outergrad.record.recorders import warn

_T = TypeVar("_T")

FORMAT = "outergrad: what a site sent, 1"


class FileTap(StepTap):
    """Writes whole steps of what this site sends to a file, for `outergrad audit --recorded`.

    Choose it to audit a training loop of your own:
    `og.distribute(model, method, tap=og.FileTap("sent.pt"))`. The file has, of each step that is
    kept, all that left this site, the weights and buffers of the model, and the rows that `truth`
    was given.

    **Such a file holds data.** Whoever has it can do what the audit does, and the truth is in it as
    it is. It is made readable by its owner alone (mode 0600); delete it after the audit. It is
    written anew, in one piece, after each step that is kept, and replaces an older one. Steps that
    do not count are not kept, nor exchanges that not all sites took part in (a quorum).

    Args:
        path: the file, in a folder that is there.
        steps: number of steps to keep, from the first on; or the numbers of those to keep, as
            events have them, the first being 0. With `og.LocalSteps` they are exchanges.
        most_bytes: size of the file, in bytes, above which no further step is kept; a warning says
            so.

    Raises:
        ValueError: a setting out of its range, or there is no such folder.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        steps: int | Collection[int] = 1,
        most_bytes: int = 1 << 30,
    ) -> None:
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir():
            raise ValueError(f"FileTap: path={str(path)!r}: there is no such folder; make it first")
        if self.path.is_dir():
            raise ValueError(f"FileTap: path={str(path)!r} is a folder; name a file")
        self.steps = _checked(steps)
        if type(most_bytes) is not int or most_bytes < 1:
            raise ValueError(f"FileTap: most_bytes={most_bytes!r}: pass a number of bytes above 0")
        self.most_bytes = most_bytes
        self._run: TappedRun | None = None
        self._kept: list[dict[str, Any]] = []
        self._step: dict[str, Any] | None = None
        self._truth: list[list[Tensor]] = []
        self._bytes, self._step_bytes = 0, 0
        self._is_full = False

    def truth(self, x: Tensor, y: Tensor) -> None:
        """Adds the batch of the next `backward()` to its step, to tell what an attack has found.

        Call it before each backward whose step is kept; with `og.LocalSteps` or `every=k` several
        make up one. The rows are copied, and are written to the file as they are. Those of a step
        that another site has discarded are dropped with it; where a backward of this site raises,
        attach a new tap.

        Args:
            x: inputs, or ids, rows first.
            y: their labels.

        Raises:
            ValueError: they are of different numbers of rows.
        """
        if len(x) != len(y):
            raise ValueError(f"FileTap.truth: {len(x)} inputs and {len(y)} labels: pass one each")
        if not self._is_done:
            self._truth.append([t.detach().to("cpu", copy=True) for t in (x, y)])

    @property
    def _is_done(self) -> bool:
        most = self.steps if isinstance(self.steps, int) else len(self.steps)
        return self._is_full or len(self._kept) >= most

    # -- what the session calls -------------------------------------------------------------------

    def attached(self, run: TappedRun) -> None:
        """Learns of which model and method it is."""
        self._run = run

    def begun(self, step: int) -> None:
        """Begins a step, with its weights, if it is to be kept."""
        before, self._step, self._step_bytes = self._step, None, 0
        truth, self._truth = self._truth, []
        if before is not None and not truth:  # it starts again, with the batch that it had
            truth = before["truth"]
        wanted = isinstance(self.steps, int) or step in self.steps
        if wanted and not self._is_done and self._run is not None:
            self._step = {"step": step, "weights": _weights(self._run), "sent": [], "truth": truth}
            self._count(self._step)

    def sent(self, sent: Sent) -> None:
        """Keeps a copy of what leaves this site in a step."""
        if self._step is not None:
            self._step["sent"].append(_plain(copied(sent)))
            self._count(self._step["sent"][-1])

    def ended(self, step: int) -> None:
        """Writes the steps so far."""
        found, self._step = self._step, None
        if found is None:
            return
        self._bytes += self._step_bytes
        self._kept.append(found)
        assert self._run is not None
        save_whole(self.path, {**_about(self._run), "steps": self._kept}, mode=PRIVATE)

    def _count(self, part: Mapping[str, Any]) -> None:
        """Counts a part of the step, and drops the step as soon as it is too large to be kept."""
        self._step_bytes += sum(t.nbytes for t in _tensors(part))
        if self._step is not None and self._bytes + self._step_bytes > self.most_bytes:
            step, self._step, self._is_full = self._step["step"], None, True
            warn(
                f"FileTap: step {step} is not kept: with it {self.path} would have more than "
                f"most_bytes={self.most_bytes:,}"
            )


class SentStep:
    """A step in a file of `FileTap`.

    Args:
        found: as it was written.

    Attributes:
        step: its number.
        weights: parameters and buffers of the model, by name.
        sent: all that left the site.
        truth: inputs and labels of each batch behind it; empty if they were not given.

    Raises:
        KeyError, TypeError, ValueError: it is damaged.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.step = _as(int, found["step"])
        weights = _as(dict, found["weights"])
        self.weights = {_as(str, name): _whole(t) for name, t in weights.items()}
        self.sent = [_sent(one, self.step) for one in found["sent"]]
        self.truth = [(_whole(x), _whole(y)) for x, y in found["truth"]]
        if any(not x.ndim or x.shape[:1] != y.shape[:1] for x, y in self.truth):
            raise ValueError("not as many labels as rows")


class SentFile:
    """A file of `FileTap`.

    Args:
        path: the file.

    Attributes:
        method: the method, as text.
        transform: what changed gradients before they travelled, as text; "" for nothing.
        local_steps: steps between two exchanges; None where gradients were shared.
        site: rank of the site.
        sites: number of sites.
        steps: the steps.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no such file.
    """

    def __init__(self, path: Path) -> None:
        found = load_plain(path)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"it is no file of og.FileTap as outergrad {__version__} reads it")
        try:
            self.method = _as(str, found["method"])
            self.transform = _as(str, found["transform"])
            self.local_steps = _or_none(int, found["local_steps"])
            self.site, self.sites = _as(int, found["site"]), _as(int, found["sites"])
            self.steps = [SentStep(one) for one in found["steps"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it is damaged: {error!r}") from error


def _checked(steps: Any) -> int | frozenset[int]:
    if type(steps) is int and steps >= 1:
        return steps
    if isinstance(steps, Collection) and not isinstance(steps, str | bytes):
        found = frozenset(steps)
        if found and all(type(step) is int and step >= 0 for step in found):
            return found
    raise ValueError(
        f"FileTap: steps={steps!r}: pass a number of steps above 0, or the numbers of steps, as "
        f"[0, 100]"
    )


def _about(run: TappedRun) -> dict[str, Any]:
    told = {"format": FORMAT, "outergrad": __version__}
    names = ("method", "transform", "local_steps", "site", "sites")
    return told | {name: getattr(run, name) for name in names}


def _weights(run: TappedRun) -> dict[str, Tensor]:
    named = {**run.model.state_dict(), **run.weights}
    tensors = {name: t for name, t in named.items() if isinstance(t, Tensor)}
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    parts = found.values() if isinstance(found, dict) else found
    return [t for part in parts if isinstance(part, Tensor | dict | list) for t in _tensors(part)]


def _plain(sent: Sent) -> dict[str, Any]:
    """Returns it in containers that `torch.load` reads without running anything."""
    content, told = (
        sent.content,
        {"name": sent.name, "scale": float(sent.scale), "owner": sent.owner},
    )
    told |= {"way": sent.way.value, "kind": sent.kind.value, "deltas": list(sent.deltas)}
    told["slot"] = None if sent.slot is None else sent.slot._asdict()
    if isinstance(content, Factors):
        return told | {"form": "factors", "content": [*content]}
    if isinstance(content, Entries):
        return told | {"form": "entries", "content": [*content]}
    if isinstance(content, Tensor):
        return told | {"form": "tensor", "content": [content]}
    return told | {"form": "tensors", "content": [*content]}


def _sent(told: Mapping[str, Any], step: int) -> Sent:
    content, form = [*told["content"]], told["form"]
    for t in content[:2] if form == "entries" else content:
        if t is not None:
            _whole(t)
    if form == "factors":
        content = Factors(*content)
    elif form == "entries":
        values_K, places_B, shape, block = content
        content = Entries(values_K, places_B, tuple(shape), block)
    elif form == "tensor":
        (content,) = content
    return Sent(
        name=_as(str, told["name"]),
        content=content,
        way=Way(told["way"]),
        step=step,
        scale=_as(float, told["scale"]),
        slot=None if told["slot"] is None else Slot(**told["slot"]),
        kind=Kind(told["kind"]),
        owner=_or_none(int, told["owner"]),
        deltas=[*map(_whole, told["deltas"])],
    )


def _as(kind: type[_T], value: Any) -> _T:
    """Returns a value that is to be of a kind.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _or_none(kind: type[_T], value: Any) -> _T | None:
    return None if value is None else _as(kind, value)


def _whole(t: Any) -> Tensor:
    """Returns a tensor, if the file holds all of its numbers: others would take any memory.

    Raises:
        TypeError: it is none.
        ValueError: it has more numbers than the file.
    """
    t = _as(Tensor, t)
    if t.layout != torch.strided or t.device.type != "cpu":
        raise ValueError(f"a tensor that is {t.layout} on {t.device}")
    if t.nbytes > t.untyped_storage().nbytes():
        raise ValueError(f"a tensor of {tuple(t.shape)} without all of its numbers")
    return t
