"""Parser of a method's settings from its name."""

import ast
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import outergrad as og

_CODECS: dict[str, og.wire.Codec] = {
    "bf16": og.wire.BF16(),
    "int8": og.wire.Int8(),
    "int4": og.wire.Int4(),
    "int3": og.wire.Int3(),
    "int2": og.wire.Int2(),
}
_OF_CODECS = ("wire", "vectors")
"""Settings whose values are codecs."""


def read_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Parses texts like ``rank=16`` and ``wire=topk0.1+int8`` into arguments by name.

    Raises:
        ValueError: There is no such codec, or a setting occurs twice.
    """
    found: dict[str, Any] = {}
    for name, value in map(_setting, texts):
        if name in found:
            raise ValueError(f"{name}= is there twice")
        found[name] = value
    return found


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Returns a suggestion for the closest known name; empty if none is close."""
    close = get_close_matches(name.lower(), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _setting(text: str) -> tuple[str, Any]:
    """Name and value; ``wire=fp32`` means no codec, and a value that is no literal is a string."""
    name, _, value = text.partition("=")
    if name in _OF_CODECS:
        return name, () if value == "fp32" else tuple(map(_codec, value.split("+")))
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _codec(text: str) -> og.wire.Codec:
    """Codec of a name like ``int8``, or ``topk0.1`` with its fraction.

    Raises:
        ValueError: There is no such codec.
    """
    if text in _CODECS:
        return _CODECS[text]
    picking = re.fullmatch(r"topk([\d.e-]+)", text)
    if picking is None:
        known = f"{', '.join(_CODECS)}, topk with a fraction, as topk0.1, or topk0.1+int8"
        raise ValueError(f"wire={text}; use {known}")
    return og.wire.TopK(float(picking[1]))
