"""Reasons why a unit travels as it does, for the coverage table."""

from __future__ import annotations

from outergrad.buckets.bucket import Load
from outergrad.core.blocks import UNSENDABLE
from outergrad.core.compressor import Compressor
from outergrad.core.reasons import Reason, Why
from outergrad.core.types import Route, overlapping


def why_block(nbytes: int, *, tapped: bool, tap_next: bool, outside: bool) -> Reason:
    """Returns the reason for the route of a block.

    Args:
        nbytes: bytes of the block on the site that sends most of it.
        tapped: whether it was captured on every site.
        tap_next: whether it will be captured in the next step.
        outside: whether its parameters also have a gradient outside it.
    """
    if tapped:
        return Reason(why=Why.REPLAYED)
    if tap_next:
        return Reason(why=Why.NOT_CAPTURED)
    if outside:
        return Reason(why=Why.USED_OUTSIDE_BLOCK)
    if nbytes >= UNSENDABLE:
        return Reason(why=Why.UNSENDABLE)
    return Reason(why=Why.BYTES, nbytes=nbytes)


def why_unit(
    load: Load, route: Route, compressor: Compressor, *, tap_next: bool, outside: bool
) -> Reason:
    """Returns the reason for the route of layers; the flags are those of `why_block`."""
    unit, auto, why = load.unit, compressor.auto_way, compressor.why
    if route == Route.GATHER and load.tapped:
        return Reason(why=Why.FACTORS, auto=auto)
    if route != Route.DENSE:
        return Reason(why=why, route=route, tapped=load.tapped, auto=auto)
    if why == Why.DENSE:
        return Reason(why=Why.DENSE)
    if tap_next:
        return Reason(why=Why.NOT_TAPPED)
    if outside:
        return Reason(why=Why.USED_OUTSIDE_LAYER)
    return Reason(why=Why.OVERLAPPING if overlapping(unit.slots) else Why.ROWS)
