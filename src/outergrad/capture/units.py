"""Ids that the loop gives for the samples of a batch, as units of privacy or as groups."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from torch import Tensor


class Units:
    """Ids for the samples of the next forward, each list of which is taken once.

    So ids of an earlier batch are never used for a later one: a forward without ids of its own has
    none.

    Args:
        call: how the loop gives them, for errors.
    """

    def __init__(self, call: str = "session.units()") -> None:
        self._call = call
        self._said: tuple[str, ...] | None = None

    def say(self, ids: Iterable[Any]) -> None:
        """Sets the ids of the next forward's samples; they replace those that none has taken.

        Raises:
            TypeError: an id is neither a whole number nor a text.
        """
        self._said = ids_of(ids, self._call)

    def take(self, samples: int | None) -> tuple[str, ...] | None:
        """Returns the ids for a forward of so many samples; None if there are none.

        Raises:
            ValueError: there is another number of ids.
        """
        said, self._said = self._said, None
        if said is not None and len(said) != samples:
            raise ValueError(
                f"{self._call}: {len(said)} ids were given, and the model is called with "
                f"{samples} samples: give one id for each, in their order"
            )
        return said


def ids_of(ids: Iterable[Any], where: str) -> tuple[str, ...]:
    """Returns ids as texts: 7 and "7" are one unit, so that no unit is taken for two.

    Errors do not show ids: their texts may be told to other sites.

    Args:
        ids: whole numbers and texts.
        where: what was called with them.

    Raises:
        TypeError: an id is neither.
    """
    values: Any = ids.tolist() if isinstance(ids, Tensor) else ids
    return tuple(_text(value, where) for value in values)


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "__index__") and not isinstance(value, bool):
        try:
            return str(index(value))  # that of a tensor, whose text is another than its number's
        except TypeError:
            pass
    raise TypeError(
        f"{where}: a {type(value).__name__} is no id: give a whole number or a text for each "
        f"sample, and leave out samples of which it is not known whose they are"
    )
