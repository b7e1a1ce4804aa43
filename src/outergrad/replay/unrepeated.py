"""What the user is told of a block whose replay was not like its forward."""

from __future__ import annotations

_NAMED = "or leave the block out of blocks="
_UNASKED = "or use another method for it, as og.DAD()"


def unrepeated(name: str, told: str, *, explicit: bool) -> str:
    """Names the block and what to do.

    Args:
        name: full name of the module.
        told: who computed it again.
        explicit: whether the user named it in `blocks`.
    """
    return (
        f"block {name!r}: {told} did not get what the forward gave. It must read nothing but its "
        f"arguments and parameters: no attribute that the model sets, no counter, no random "
        f"numbers of Python or numpy, no setting or kind of device that other sites do not have. "
        f"Pass values as arguments, draw random numbers with torch, "
        f"{_NAMED if explicit else _UNASKED}"
    )
